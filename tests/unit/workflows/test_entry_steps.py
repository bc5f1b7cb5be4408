from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachepipe.adapters.workdir import Binding, EntryDir, WorkDir, build_root
from cachepipe.domain.evidence import EntryEvidence, Work
from cachepipe.domain.record import record_bytes
from cachepipe.workflows.entry_steps import is_seed, seed, used_files
from cachepipe.workflows.export import DESCRIPTION, is_described
from tests.support.restoring import write_tree

WHOLE = b'{"texts":{"self.width":"int 8"}}'
FILES = [
    "inductor/ab/cab.py",
    "inductor/ab/cxy.best_config",
    "inductor/ab/cxy.py",
    "inductor/cd/cab.so",
    "triton/0/KEY/kernel.cubin",
    "triton/0/KEY/kernel.json",
    "triton/0/KEY/__grp__kernel.json",
]


def test_files_that_nobody_opened_are_dropped() -> None:
    assert used_files(FILES, {"inductor/ab/cab.py"}) == ["inductor/ab/cab.py"]


def test_a_file_beside_an_opened_one_with_the_same_stem_is_kept() -> None:
    kept = used_files(FILES, {"triton/0/KEY/kernel.json", "inductor/ab/cxy.py"})
    assert kept == ["inductor/ab/cxy.best_config", "inductor/ab/cxy.py", *FILES[4:6]]


def test_the_same_stem_in_another_folder_does_not_count() -> None:
    assert "inductor/cd/cab.so" not in used_files(FILES, {"inductor/ab/cab.py"})


def test_settle_rounds_are_seeded_with_the_records_of_all_earlier_rounds_and_on_a_gpu_with_nothing_else(
    tmp_path: Path,
) -> None:
    entry = WorkDir(tmp_path / "work").entry(Binding("a" * 64, "f" * 64, "/var/cache/cachepipe/demo"))
    (tmp_path / "cache").mkdir(mode=0o700)
    with build_root(tmp_path / "cache" / "demo") as root:
        previous = ""
        for step in ("tune", "settle-1", "settle-2"):
            if previous:
                root.fill(entry.tree(previous), lambda path: is_seed("cuda", path))
                assert not list(root.path.rglob("*.cubin"))
            for name in (f"inductor/ab/{step}.best_config", f"inductor/ab/{step}.kernel_perf", "triton/0/K/k.cubin"):
                (root.path / name).parent.mkdir(parents=True, exist_ok=True)
                (root.path / name).write_text(step)
            found = EntryEvidence("mlp", step, "2.11.0", (), (), Work(), (), 0.0, 0.0, 0.0, {})
            entry.pending(step).write_bytes(record_bytes(found))
            entry.finish(step, root)
            previous = step
        root.fill(entry.tree(previous), lambda path: is_seed("cuda", path))
        records = sorted(path.stem for path in root.path.rglob("*.best_config"))
        assert records == ["settle-1", "settle-2", "tune"]
        assert len(list(root.path.rglob("*.kernel_perf"))) == 3
    assert is_seed("cpu", "inductor/ab/cab.so") and not is_seed("cuda", "inductor/ab/cab.so")
    assert is_seed("cuda", "inductor/cache/system") and not is_seed("cuda", "inductor/fxgraph/ab/key/graph")


@pytest.mark.parametrize(
    "found",
    [None, b"", WHOLE[:-1], WHOLE + WHOLE, b"[]", b'{"self.width":"int 8"}', b'{"texts":{"self.width":8}}', b"\xff"],
)
def test_a_description_that_is_missing_or_damaged_is_made_again(tmp_path: Path, found: bytes | None) -> None:
    entry = EntryDir(tmp_path)
    entry.write(DESCRIPTION, WHOLE)
    assert is_described(entry)
    (tmp_path / DESCRIPTION).unlink()
    if found is not None:
        entry.write(DESCRIPTION, found)
    assert not is_described(entry)


def choice(of: str, hashed: str = "h") -> bytes:
    return json.dumps({"XBLOCK": of, "configs_hash": hashed, "time_taken_ms": 1}).encode()


def test_a_kernel_that_another_entry_has_is_chosen_as_there(tmp_path: Path) -> None:
    shared, pair, other = (f"inductor/ab/{name}.best_config" for name in ("shared", "pair", "other"))
    own, searched = "inductor/gh/own.best_config", "inductor/ij/searched.best_config"
    rest = ("inductor/cache/system", "triton/0/K/k.cubin")
    trees = {
        "first": {shared: choice("first"), other: choice("first"), searched: choice("first", "another list")},
        "second": {shared: choice("second"), pair: choice("second"), own: b"cut"},
        "own": {name: choice("own") for name in (shared, pair, own, searched)},
    }
    folders = [
        write_tree(tmp_path / name, {**tree, **dict.fromkeys(rest, name.encode())}) for name, tree in trees.items()
    ]
    (tmp_path / "cache").mkdir(mode=0o700)
    with build_root(tmp_path / "cache" / "demo") as root:
        seed(root, "cuda", folders)
        found = {p.relative_to(root.path).as_posix(): p.read_bytes() for p in root.path.rglob("*") if p.is_file()}
    assert found == {
        shared: choice("first"),
        pair: choice("second"),
        own: choice("own"),
        searched: choice("own"),
        rest[0]: b"own",
    }
