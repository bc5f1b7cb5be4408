"""A14, A1, F10 through the builder's own worker: what loses an entry is named, with the value that was built and the one that
was called. Every other change is in `test_explained_matrix.py`, all in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachepipe.domain.entry import Context, EntrySpec
from cachepipe.domain.evidence import EntryEvidence, hit_rate, layer_counts
from cachepipe.domain.explain import explain_misses
from cachepipe.domain.record import to_json
from tests.support.jobs import run_job, spec_of

BASE = spec_of("mm_product", requires_grad=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EntryEvidence]:
    folder = tmp_path_factory.mktemp("built")
    return folder, run_job(BASE, folder, record_components=True)


def explained(built: tuple[Path, EntryEvidence], spec: EntrySpec, **changes: Any) -> tuple[EntryEvidence, str]:
    folder, cold = built
    evidence = run_job(spec, folder, "verify", record_components=True, **changes)
    explain_data = {
        "lookups": [to_json(lookup) for lookup in cold.lookups],
        "components": cold.components,
        "settings": cold.settings,
    }
    return evidence, "\n".join(explain_misses(spec.id, evidence, explain_data))


def context(**changes: Any) -> Context:
    return replace(BASE.context, **changes)


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"context": context(grad="grad")}, ["grad mode: built inference_mode, called grad"]),
        ({"options": {"epilogue_fusion": False}}, ["inductor config epilogue_fusion: built True, called False"]),
    ],
    ids=["grad", "option"],
)
def test_case_a14_a1_a_setting_that_loses_the_entry_is_named(
    built: tuple[Path, EntryEvidence], changes: dict[str, Any], sentences: list[str]
) -> None:
    evidence, words = explained(built, replace(BASE, **changes))
    assert hit_rate(evidence) < 1.0
    assert layer_counts(evidence)["aotautograd"]["miss"] == 1
    for sentence in sentences:
        assert sentence in words, words


def test_case_a14_the_thread_count_is_named(built: tuple[Path, EntryEvidence]) -> None:
    before = built[1].settings["threads"]
    other = "1" if before != "1" else "2"
    evidence, words = explained(built, BASE, variables={"OMP_NUM_THREADS": other, "MKL_DYNAMIC": "FALSE"})
    assert hit_rate(evidence) < 1.0
    assert f"threads: {before} → {other}" in words, words


def test_case_f10_no_grad_finds_what_inference_mode_built(built: tuple[Path, EntryEvidence]) -> None:
    evidence, words = explained(built, replace(BASE, context=context(grad="no_grad")))
    assert hit_rate(evidence) == 1.0 and words == ""


def test_case_f4_a_size_outside_the_buckets_is_a_miss_of_its_own_inputs(built: tuple[Path, EntryEvidence]) -> None:
    evidence, words = explained(built, replace(BASE, shape_buckets=({"batch": 3},)))
    assert layer_counts(evidence)["aotautograd"]["miss"] == 1
    assert "shape (3, 8) of x not in coverage, nearest bucket batch=8 (8, 8)" in words, words
