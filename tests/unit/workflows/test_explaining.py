"""`explain` on a service's file of events: compared with the builder's evidence, or with torch's reasons alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.workdir import write_evidence
from cachepipe.domain.evidence import EntryEvidence, Lookup, Work
from cachepipe.errors import IntegrityError, UsageError
from cachepipe.workflows.explaining import explain_files

MISS = {
    "shape_bucket": "-",
    "graph": "0/1",
    "layer": "fxgraph",
    "outcome": "miss",
    "key": "fhere",
    "reason": "full_miss",
}
HIT = {**MISS, "outcome": "hit", "graph": "0/0", "key": "fbuilt"}
COMPONENTS = {"cpp_runtime_thread_count": ["1", "2"], "x": ["1", "same"]}


def events(path: Path, **facts: Any) -> Path:
    row = {"event": "evidence", "lookups": [HIT, MISS], "settings": {"threads": "7"}, "entries": ["mlp"], **facts}
    lines = [{"event": "ready", "misses": 1}, row, {"event": "late_compile"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def built(folder: Path) -> Path:
    return write_evidence(
        folder,
        EntryEvidence(
            *("mlp/float32/default", "trim", "2.13.0", ()),
            lookups=(Lookup("batch=1", "0/0", "fxgraph", "miss", "fbuilt"),),
            work=Work(),
            tuned_kernels=(),
            import_s=0.0,
            build_s=0.0,
            ready_s=0.0,
            settings={"threads": "2"},
            components={"fxgraph/fbuilt": COMPONENTS},
        ),
    )


def test_case_a1_a_services_miss_is_compared_with_the_builders_evidence(tmp_path: Path) -> None:
    here = {"fxgraph/fhere": {**COMPONENTS, "cpp_runtime_thread_count": ["2", "7"]}}
    (answer,) = explain_files([events(tmp_path / "e.jsonl", components=here), built(tmp_path / "built")])
    assert (answer.entry, answer.step, answer.hits, answer.lookups) == ("mlp", "service", 1, 2)
    assert [one.cause for one in answer.explanations] == ["threads: 2 → 7"]
    assert "OMP_NUM_THREADS=2" in answer.explanations[0].fix and answer.is_compared


def test_without_components_a_service_is_told_how_to_record_them(tmp_path: Path) -> None:
    (answer,) = explain_files([events(tmp_path / "e.jsonl"), built(tmp_path / "built")])
    text = "\n".join(answer.lines())
    assert "CACHEPIPE_EXPLAIN=1" in text and "threads: built 2, called 7" in text


def test_without_the_builder_the_head_says_what_to_name(tmp_path: Path) -> None:
    (answer,) = explain_files([events(tmp_path / "e.jsonl")])
    assert not answer.is_compared and "`--ref` and `--store`" in answer.lines()[0]


def test_files_that_are_no_events_are_refused_by_line(tmp_path: Path) -> None:
    broken = tmp_path / "e.jsonl"
    broken.write_text('{"event": "ready"}\nno json\n')
    with pytest.raises(IntegrityError, match=r"e\.jsonl:2"):
        explain_files([broken])
    events(broken, lookups=[{"layer": 5}])
    with pytest.raises(IntegrityError):
        explain_files([broken])
    with pytest.raises(UsageError):
        explain_files([tmp_path / "absent.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        explain_files([tmp_path / "empty"])
