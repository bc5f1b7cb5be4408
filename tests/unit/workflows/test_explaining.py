"""`explain` on a service's file of events: compared with the builder's evidence, or with torch's reasons alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.workdir import read_evidence, write_evidence
from cachepipe.domain.evidence import EntryEvidence, Lookup, Work
from cachepipe.errors import IntegrityError, UsageError
from cachepipe.workflows.explaining import explain_files
from tests.support.restoring import publish_release

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


def test_late_compiles_are_told_of_the_process_and_of_what_it_forked_and_once_per_reason(tmp_path: Path) -> None:
    late = {"event": "late_compile", "start": "s", "seconds": 1.5, "outcome": "compiled", "place": "forward (m.py:3)"}
    size = {"graph": "0/2", "inputs": "x:5x8", "reason": "tensor 'x' size mismatch"}
    rows = [
        *({"event": "evidence", "lookups": [HIT], "entries": ["mlp"], "start": "s", "pid": pid} for pid in (1, 2)),
        {"event": "evidence", "lookups": [HIT], "start": "of no artifact", "pid": 9},
        {**late, **size, "pid": 1},
        {**late, **size, "pid": 1, "seconds": None},
        {**late, "graph": "0/3", "pid": 2, "settings": "grad mode: no_grad to grad", "reason": "GLOBAL_STATE changed"},
        {**late, "graph": "0/4", "pid": 9, "start": "of no artifact", "place": ""},
    ]
    path = tmp_path / "e.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, cold = explain_files([path])
    assert first.lines() == (
        "mlp · service: 1 hits of 1 lookups",
        "mlp · late compile of graph 0/2",
        "  forward (m.py:3) with x:5x8: tensor 'x' size mismatch (2 times, compiled, 1.50 s)",
        "  fix: call a covered shape (`entry.covered`), or add this one to `shape_buckets`",
    )
    assert "grad mode: no_grad to grad" in second.lines()[-1] and "inside `entry.context()`" in second.lines()[-1]
    assert "a backward graph: its first compile" in cold.lines()[2] and "nothing is restored" in cold.lines()[3]
    path.write_text(
        "".join(json.dumps({**row, "pid": 1 if "lookups" in row else 7}) + "\n" for row in (rows[0], rows[3]))
    )
    (parent,) = explain_files([path])
    assert [one.layer for one in parent.explanations] == ["late"]  # of a forked worker


def test_without_the_builder_the_head_says_what_to_name(tmp_path: Path) -> None:
    (answer,) = explain_files([events(tmp_path / "e.jsonl")])
    assert not answer.is_compared and "`--ref` and `--store`" in answer.lines()[0]


def test_files_that_are_no_events_are_refused_by_line(tmp_path: Path) -> None:
    broken = tmp_path / "e.jsonl"
    broken.write_text("no json\nnor this\n")
    with pytest.raises(IntegrityError, match=r"e\.jsonl:1"):
        explain_files([broken])
    with pytest.raises(UsageError):
        explain_files([tmp_path / "absent.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        explain_files([tmp_path / "empty"])


@pytest.mark.parametrize(
    "facts",
    [
        {"lookups": [{"layer": 5}]},
        {"lookups": 5},
        {"lookups": [{**MISS, "outcome": "warm"}]},
        {"settings": ["threads"]},
        {"components": {"fxgraph/fhere": {"threads": "2"}}},
        {"components": [1]},
        {"entries": [5]},
        {"entries": "mlp"},
    ],
)
def test_an_event_of_another_form_is_refused_with_its_line_and_is_no_bug(tmp_path: Path, facts: Any) -> None:
    with pytest.raises(IntegrityError, match=r"e\.jsonl:2") as caught:
        explain_files([events(tmp_path / "e.jsonl", **facts)])
    assert "CACHEPIPE_EVENTS" in caught.value.hint


def test_a_line_cut_by_a_kill_and_separators_inside_of_texts_cost_no_other_line(tmp_path: Path) -> None:
    path = events(tmp_path / "e.jsonl")
    whole = path.read_text()
    reason = "full_miss \u2028 \x85 \x0b \x0c \x1c \r end"
    row = json.dumps({"event": "evidence", "lookups": [{**MISS, "reason": reason}]}, ensure_ascii=False)
    path.write_bytes(whole[: len(whole) // 2].encode() + b"\n" + row.encode() + b"\n\xff\xfe\n" + row.encode()[:-9])
    said: list[str] = []
    (answer,) = explain_files([path], say=said.append)
    assert answer.lookups == 1 and answer.explanations
    assert len(said) == 1 and "left out: 3 of 5 lines" in said[0] and f"{path}:" in said[0]


def test_an_artifact_to_compare_with_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without a store"):
        explain_files([events(tmp_path / "e.jsonl")], None, "mlp@stable")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """A store whose channel `demo@stable` has a target for each device, built with 2 and with 8 threads; device → artifact."""
    base = tmp_path_factory.mktemp("both")
    artifacts = {}
    for number, (device, threads) in enumerate((("cpu", "2"), ("cuda", "8"))):
        components = {"fxgraph/fbuilt": {"cpp_runtime_thread_count": [threads, threads], "x": ["1", "same"]}}
        lookups = [{"layer": "fxgraph", "shape_bucket": "batch=1", "key": "fbuilt"}]
        data = {"mlp/float32/default": {"components": components, "lookups": lookups, "settings": {"threads": threads}}}
        published = publish_release(base, number=number, device=device, explain_data=data)
        artifacts[device] = published.row.artifact
    return published.store.url, artifacts


def verified(folder: Path, *devices: str) -> Path:
    """Writes what `verify --report` leaves of one entry on each device: a miss with 7 threads."""
    for device in devices:
        here = {"fxgraph/fhere": {"cpp_runtime_thread_count": ["7", "7"], "x": ["1", "same"]}}
        miss = Lookup("batch=1", "0/0", "fxgraph", "miss", "fhere")
        one = EntryEvidence(
            *("mlp/float32/default", "verify", "2.13.0", (), (miss,), Work(), (), 0.0, 0.0, 0.0, {"threads": "7"}),
            components=here,
            device=device,
        )
        write_evidence(folder, one)
    return folder


BUILT = {"cpu": "threads: 2 → 7", "cuda": "threads: 8 → 7"}


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cpu",), ("cuda",)])
def test_each_target_in_a_folder_is_compared_with_its_own_artifact(
    both: tuple[str, dict[str, str]], tmp_path: Path, devices: tuple[str, ...]
) -> None:
    answers = explain_files([verified(tmp_path, *devices)], both[0], "demo@stable")
    assert all(answer.is_compared and "name the builder's evidence" not in answer.lines()[0] for answer in answers)
    found = {answer.entry: [one.cause for one in answer.explanations] for answer in answers}
    shown = [f"mlp/float32/default on {device}" if len(devices) > 1 else "mlp/float32/default" for device in devices]
    assert found == {name: [BUILT[device]] for name, device in zip(shown, devices, strict=True)}


def test_evidence_is_never_compared_with_the_artifact_of_another_device(
    both: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    said: list[str] = []
    ref = both[1]["cuda"]
    answers = explain_files([verified(tmp_path, "cpu", "cuda")], both[0], ref, say=said.append)
    assert [answer.is_compared for answer in answers] == [False, True]
    assert [one.cause for one in answers[1].explanations] == [BUILT["cuda"]]
    assert said == [f"not compared: mlp/float32/default on cpu: it ran on cpu, and {ref} is for cuda"]


def test_a_service_is_compared_with_the_target_that_it_restored(
    both: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    here = {"fxgraph/fhere": {"cpp_runtime_thread_count": ["7", "7"], "x": ["1", "same"]}}
    for device, cause in BUILT.items():
        path = events(tmp_path / f"{device}.jsonl", components=here, device=device)
        (answer,) = explain_files([path], both[0], "demo@stable")
        assert [one.cause for one in answer.explanations] == [cause]
    silent = events(tmp_path / "earlier.jsonl", components=here)  # of a release that did not write it
    with pytest.raises(UsageError, match="has several targets: ") as caught:
        explain_files([silent], both[0], "demo@stable")
    assert both[1]["cpu"] in str(caught.value) and "artifact id" in caught.value.hint
    (answer,) = explain_files([silent], both[0], both[1]["cuda"])
    assert [one.cause for one in answer.explanations] == [BUILT["cuda"]]


def test_two_builders_in_one_folder_each_answer_for_their_own_target(tmp_path: Path) -> None:
    folder = verified(tmp_path, "cpu", "cuda")
    for device, threads in (("cpu", "2"), ("cuda", "8")):
        one = read_evidence(built(tmp_path / device))
        assert one is not None
        components = {"fxgraph/fbuilt": {"cpp_runtime_thread_count": [threads, threads], "x": ["1", "same"]}}
        write_evidence(folder, replace(one, device=device, components=components))
    answers = explain_files([folder])
    assert [[one.cause for one in answer.explanations if one.layer == "fxgraph"] for answer in answers] == [
        [BUILT["cpu"]],
        [BUILT["cuda"]],
    ]
