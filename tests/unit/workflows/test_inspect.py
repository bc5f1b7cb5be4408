"""`ls`, `show` and `diff` tell what is published, as trees and as lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.errors import MissError
from cachepipe.workflows.channels import promote, revoke
from cachepipe.workflows.inspect import diff, diff_lines, ls, ls_lines, show, show_lines, size_text
from cachepipe.workflows.publish import publish
from tests.support.artifacts import CPU_PARTS, CUDA_PARTS, NOW, entry_record, entry_spec, make_artifact


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_an_empty_store_says_so(store: LocalStore) -> None:
    assert ls_lines(ls(store)) == [f"nothing is published: {store.url}"]


def test_every_channel_is_listed_with_version_and_targets(store: LocalStore, tmp_path: Path) -> None:
    cpu = publish(store, "demo", "candidate", make_artifact(tmp_path, 1), NOW)
    gpu = publish(store, "demo", "candidate", make_artifact(tmp_path, 2, CUDA_PARTS), NOW)
    publish(store, "other", "candidate", make_artifact(tmp_path, 3, release="other"), NOW)
    promote(store, "demo", "candidate", "stable", cpu.artifact, NOW)
    revoke(store, "demo", "candidate", cpu.artifact, NOW)
    tree = ls(store)
    assert [(c["name"], c["channel"], c["version"], len(c["targets"])) for c in tree["channels"]] == [
        ("demo", "candidate", 3, 1),
        ("demo", "stable", 1, 1),
        ("other", "candidate", 1, 1),
    ]
    assert len(ls(store, "demo")["channels"]) == 2
    text = "\n".join(ls_lines(tree))
    assert "demo@candidate:3" in text
    assert "NVIDIA H200, 580.65.06" in text
    assert "torch 2.13.0+cpu, avx512, 2" in text
    assert f"revoked: {cpu.statement[:12]}" in text
    assert gpu.artifact in text
    json.dumps(tree)


def test_show_has_sizes_fingerprint_coverage_and_evidence(store: LocalStore, tmp_path: Path) -> None:
    row = publish(store, "demo", "candidate", make_artifact(tmp_path, 1), NOW)
    tree = show(store, "demo@candidate")
    (artifact,) = tree["artifacts"]
    assert artifact["statement"] == row.statement
    assert artifact["status"] == "development key"
    assert artifact["fingerprint"] == CPU_PARTS
    assert artifact["sizes"]["files"] == 3
    assert artifact["sizes"]["tuned_bytes"] == 1_000_000
    (entry,) = artifact["entries"]
    assert [facts["shape_bucket"] for facts in entry["shape_buckets"]] == ["batch=1", "batch=8"]
    assert entry["shape_buckets"][0]["cold_s"] == 12.0
    assert entry["files"] == {"fxgraph": 2, "native": 1}
    json.dumps(tree)
    text = "\n".join(show_lines(tree))
    for words in ("tuned 1.0 MB", "net/float32/max-autotune", "batch=8", "12.00s", "0.50s", "cpu_isa", "2 fxgraph"):
        assert words in text


def test_show_of_a_channel_has_all_targets(store: LocalStore, tmp_path: Path) -> None:
    for number, facts in enumerate((CPU_PARTS, CUDA_PARTS)):
        publish(store, "demo", "candidate", make_artifact(tmp_path, number, facts), NOW)
    assert [artifact["device"] for artifact in show(store, "demo@candidate")["artifacts"]] == ["cpu", "cuda"]
    with pytest.raises(MissError):
        show(store, "demo@stable")


def test_an_artifact_does_not_differ_from_itself(store: LocalStore, tmp_path: Path) -> None:
    row = publish(store, "demo", "candidate", make_artifact(tmp_path, 1), NOW)
    assert diff_lines(diff(store, row.artifact, "demo@candidate")) == ["no differences"]


def test_diff_names_what_changed_in_words(store: LocalStore, tmp_path: Path) -> None:
    before = (
        entry_record(entry_spec("net"), {"factory": "1" * 64, "source:demo.py": "a" * 64, "args": "c" * 64}),
        entry_record(entry_spec("gone")),
    )
    after = (
        entry_record(
            entry_spec("net", sizes=(8, 16)), {"factory": "1" * 64, "source:demo.py": "b" * 64, "mode": "d" * 64}
        ),
        entry_record(entry_spec("new")),
    )
    old = publish(store, "demo", "a", make_artifact(tmp_path, 1, entries=before), NOW)
    facts = {name: value for name, value in {**CPU_PARTS, "torch": "2.14.0+cpu"}.items() if name != "compiler"}
    new = publish(store, "demo", "b", make_artifact(tmp_path, 2, facts, entries=after), NOW)
    tree = diff(store, old.artifact, new.artifact)
    assert tree["fingerprint"] == {
        "torch": ["2.13.0+cpu", "2.14.0+cpu"],
        "compiler": [CPU_PARTS["compiler"], None],
    }
    assert (tree["added"], tree["removed"]) == (["new/float32/max-autotune"], ["gone/float32/max-autotune"])
    assert tree["changed"]["net/float32/max-autotune"] == {
        "key_parts": ["args", "mode", "source:demo.py"],
        "shape_buckets_added": ["batch=16"],
        "shape_buckets_removed": ["batch=1"],
    }
    json.dumps(tree)
    lines = diff_lines(tree)
    assert "fingerprint torch: 2.13.0+cpu → 2.14.0+cpu" in lines
    assert f"fingerprint compiler: {CPU_PARTS['compiler']} → none" in lines
    assert "entry net/float32/max-autotune: key differs in args, mode, source:demo.py" in lines
    assert "entry net/float32/max-autotune: shape bucket added: batch=16" in lines
    assert "entry removed: gone/float32/max-autotune" in lines


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (6_100_000, "6.1 MB"),
        (999_999, "1.0 MB"),
        (2 * 10**12, "2000.0 GB"),
    ],
)
def test_sizes_are_told_in_powers_of_ten(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
