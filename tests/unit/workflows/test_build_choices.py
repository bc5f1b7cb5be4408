from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.provenance import provenance
from cachepipe.adapters.workdir import EntryDir
from cachepipe.domain.artifact import Blob, FileRow, FileTable, Segment, read_table, table_bytes
from cachepipe.domain.entry import Context, EntrySpec
from cachepipe.domain.fingerprint import Part
from cachepipe.domain.manifest import Manifest
from cachepipe.domain.manifest_reader import read_manifest
from cachepipe.domain.statement import FORMAT, EntryRecord, Statement
from cachepipe.errors import BuildError, UsageError
from cachepipe.workflows.assemble import Piece, check_size, explain_bytes
from cachepipe.workflows.carry import Earlier, part_of_table
from cachepipe.workflows.fetch import Artifact
from cachepipe.workflows.plan import Plan, PlannedEntry, chosen_entries
from cachepipe.workflows.targets import matching_devices
from cachepipe.workflows.verify import stale_entries

DIGEST = "0" * 64


def spec(model: str, mode: str = "default") -> EntrySpec:
    return EntrySpec(
        model=model, dtype="float32", mode=mode, device="cpu", factory="m:f", args={}, method="forward", call="kwargs",
        fullgraph=True, dynamic=False, options={}, eval=True, requires_grad=False, memory_format="contiguous",
        context=Context("inference_mode", None, "highest", False), inputs={}, shape_buckets=({},), dynamic_dims={},
        train=False, loss=None, rtol=0.0, atol=0.0,
    )  # fmt: skip


def planned(model: str, mode: str = "default", **parts: str) -> PlannedEntry:
    return PlannedEntry(spec(model, mode), "key of " + repr(sorted(parts.items())), parts)


def plan(*entries: PlannedEntry) -> Plan:
    return Plan("demo", "/var/cache/cachepipe/demo", "cpu", entries, ())


def statement(*entries: PlannedEntry, environment: Any = None) -> Statement:
    records = tuple(
        EntryRecord(entry.spec, entry.key, entry.key_parts, {}, (), 0, {}, environment or {}) for entry in entries
    )
    blob = Blob(DIGEST, 1, 1)
    return Statement(
        format=FORMAT, artifact="01J", release="demo", root="/r", created_at="", device="cpu",
        fingerprint=(Part("torch", "2"),), entries=records, packs=(blob,), table=blob, explain=blob, files=0,
        unpacked_bytes=0, tuned_bytes=0, variables={}, compiler={}, gates={}, builder={},
    )  # fmt: skip


ENTRIES = (planned("a"), planned("a", "max-autotune"), planned("b"))


def test_only_chooses_a_model_or_one_of_its_modes() -> None:
    assert len(chosen_entries(plan(*ENTRIES), ())) == 3
    assert chosen_entries(plan(*ENTRIES), ("a",)) == {"a/float32/default", "a/float32/max-autotune"}
    assert chosen_entries(plan(*ENTRIES), ("a:default", "b")) == {"a/float32/default", "b/float32/default"}


def test_only_must_name_an_entry() -> None:
    with pytest.raises(UsageError) as caught:
        chosen_entries(plan(*ENTRIES), ("a:reduce-overhead",))
    assert "a:max-autotune" in caught.value.hint


def test_a_manifest_that_moved_on_is_stale_and_the_changed_parts_are_named() -> None:
    old = statement(planned("a", options="1", factory="1"), planned("gone"))
    assert stale_entries(plan(planned("a", options="1", factory="1"), planned("gone")), old) == ()
    assert stale_entries(plan(planned("a", options="2", factory="1"), planned("new")), old) == (
        "stale: a/float32/default: changed since the build: options",
        "stale: new/float32/default: in the manifest, not in artifact 01J",
        "stale: gone/float32/default: in artifact 01J, not in the manifest",
    )


def test_a_release_is_the_same_only_with_the_same_names_and_keys() -> None:
    earlier = Earlier(Artifact(statement(*ENTRIES), b"", b"", DIGEST, "signed", ""), {})
    assert earlier.is_the_same_release(plan(*ENTRIES))
    assert not earlier.is_the_same_release(plan(*ENTRIES[:2]))
    assert not earlier.is_the_same_release(plan(*ENTRIES[:2], planned("c")))


def test_the_part_of_one_entry_names_only_the_packs_that_hold_its_files() -> None:
    packs = (Blob("1" * 64, 9, 10), Blob("2" * 64, 9, 4), Blob("3" * 64, 9, 6))
    rows = (
        FileRow("inductor/a.py", 0o644, 10, DIGEST, (Segment(0, 0, 10),), (0,), False),
        FileRow("inductor/b.py", 0o644, 4, DIGEST, (Segment(1, 0, 4),), (1,), False),
        FileRow("inductor/c.py", 0o644, 6, DIGEST, (Segment(2, 0, 6),), (0, 1), False),
    )
    used, part = part_of_table(packs, FileTable("/r", rows), 1)
    assert used == packs[1:]
    assert [(row.path, row.segments) for row in part.files] == [
        ("inductor/b.py", (Segment(0, 0, 4),)),
        ("inductor/c.py", (Segment(1, 0, 6),)),
    ]
    assert read_table(table_bytes(part), used, 2) == part


def test_a_statement_that_no_restore_would_read_names_its_largest_part() -> None:
    big = {f"setting {number}": "x" * 200 for number in range(1000)}
    check_size(statement(*ENTRIES))
    found = statement(*ENTRIES)
    bloated = replace(found, entries=(*found.entries[:2], statement(planned("b"), environment=big).entries[0]))
    with pytest.raises(BuildError, match="the largest part is entry b/float32/default"):
        check_size(bloated)


def manifest(*targets: dict[str, str]) -> Manifest:
    model = {"name": "m", "factory": "m:f", "dtypes": ["float32"], "inputs": {"x": {"shape": [1]}}}
    found = read_manifest({"version": 1, "name": "demo", "targets": list(targets), "models": [model]})
    assert isinstance(found, Manifest)
    return found


def test_a_target_of_another_machine_is_skipped_with_a_line() -> None:
    said: list[str] = []
    found = matching_devices(manifest({"device": "cuda", "gpu": "No Such GPU"}, {"device": "cpu"}), said.append)
    assert found == ("cpu",) and len(said) == 1 and "cuda No Such GPU" in said[0]


def test_a_machine_that_matches_no_target_is_refused() -> None:
    with pytest.raises(BuildError, match="No Such GPU"):
        matching_devices(manifest({"device": "cuda", "gpu": "No Such GPU"}), lambda text: None)


def test_provenance_names_no_host_and_needs_no_git(tmp_path: Path) -> None:
    (tmp_path / "manifest.yaml").write_text("version: 1")
    facts = provenance(tmp_path / "manifest.yaml")
    assert {"cachepipe", "host", "manifest"} <= set(facts) and len(facts["host"]) == 16


def test_explain_data_that_does_not_fit_keeps_lookups_and_drops_components() -> None:
    entry = planned("a")
    record = statement(entry).entries[0]
    part = {"components": {"fxgraph/k": {"c": ["h", "x" * 500]}}, "lookups": [1]}
    piece = Piece(entry, Path(), record, part, EntryDir(Path()), (), is_carried=False)
    assert json.loads(explain_bytes([piece])) == {"a/float32/default": part}
    assert json.loads(explain_bytes([piece], 100)) == {"a/float32/default": {"components": {}, "lookups": [1]}}


def test_a_tolerance_that_was_not_judged_is_another_release() -> None:
    strict = replace(ENTRIES[0], spec=replace(ENTRIES[0].spec, rtol=1e-9))
    earlier = Earlier(Artifact(statement(*ENTRIES), b"", b"", DIGEST, "signed", ""), {})
    assert not earlier.is_the_same_release(plan(strict, *ENTRIES[1:]))


def test_a_gpu_builder_is_matched_by_its_compiler_only_for_native_functions() -> None:
    native = replace(planned("a"), spec=replace(spec("a"), device="cuda", engine="aot"))
    assert [plan(*entries).has_host_code for entries in ((planned("a"),), ())] == [True, True]
    on_gpu = replace(plan(planned("b")), device="cuda")
    assert not on_gpu.has_host_code
    assert replace(on_gpu, entries=(planned("b"), native)).has_host_code
