from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.workdir import write_evidence, write_json
from cachepipe.domain.evidence import BucketEvidence, EntryEvidence, Lookup, Work
from cachepipe.domain.phases import Phases
from cachepipe.errors import IntegrityError, UsageError
from cachepipe.workflows.report import (
    BUCKET_COLUMNS,
    STEP_COLUMNS,
    bucket_cells,
    phase_bar,
    report,
    report_json,
    step_cells,
    work_text,
)


def evidence(step: str, first_call_s: float, order: tuple[int, ...] = (1, 8), **changes: Any) -> EntryEvidence:
    phases = Phases(trace_s=first_call_s / 2, lookup_s=first_call_s / 2)
    buckets = tuple(
        BucketEvidence({"batch": batch}, 3, first_call_s, phases, 1, 0, Work(), "d", 0.0, True) for batch in order
    )
    lookups = changes.pop("lookups", (Lookup("batch=1", "0/0", "fxgraph", "hit"),))
    return EntryEvidence(
        "mlp/float32/default", step, "2.13.0", buckets, lookups, Work(), (), 1.0, 0.5, 3.0, {}, **changes
    )


def test_cold_restored_and_eager_stand_beside_each_other_in_the_manifests_order(tmp_path: Path) -> None:
    for one in (evidence("tune", 10.0), evidence("prove", 2.0, (8, 1)), evidence("eager", 0.5)):
        write_evidence(tmp_path, one)
    write_json(tmp_path / "build.cpu.json", {"build": {}})
    found = report([tmp_path])
    assert [row.shape_bucket for row in found.shape_buckets] == ["batch=1", "batch=8"]
    assert [(row.cold_s, row.restored_s, row.eager_s) for row in found.shape_buckets] == [(10.0, 2.0, 0.5)] * 2
    assert found.shape_buckets[0].hits == {"fxgraph": "1/1"} and found.misses == ()
    assert all(len(cells) == len(BUCKET_COLUMNS) for cells in bucket_cells(found))
    assert bucket_cells(found)[0][6] == "5.0"
    assert all(len(cells) == len(STEP_COLUMNS) for cells in step_cells(found))


def test_a_miss_of_a_restored_process_is_listed_with_torchs_reason(tmp_path: Path) -> None:
    miss = (Lookup("batch=8", "0/0", "aotautograd", "bypass", "", "a custom operator"),)
    found = report([write_evidence(tmp_path, evidence("verify", 2.0, lookups=miss))])
    assert found.misses == ("mlp/float32/default · batch=8: aotautograd bypass (a custom operator)",)
    assert report_json(found)["steps"][0]["hit_rate"] == 0.0


def test_files_that_are_named_must_be_evidence(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(IntegrityError):
        report([tmp_path / "x.json"])
    with pytest.raises(UsageError):
        report([tmp_path / "absent.json"])
    with pytest.raises(UsageError):
        report([tmp_path])


def test_a_bar_shows_each_phase_by_its_share_of_the_longest_call() -> None:
    phases = Phases(trace_s=1.0, lookup_s=0.5, load_s=0.5)
    assert phase_bar(phases, 2.0, 8) == "ttttlloo"
    assert phase_bar(phases, 4.0, 8) == "ttlo"
    assert phase_bar(Phases(), 0.0) == ""


def test_work_is_said_in_words() -> None:
    assert work_text(Work()) == "none"
    assert work_text(Work(benchmarks=46, triton_compiles=2)) == "46 benchmarks, 2 triton compiles"
