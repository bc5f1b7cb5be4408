from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cachepipe.adapters.cachetree import kind_of, list_tree, merge_trees, name_cubins_in_full
from cachepipe.errors import IntegrityError
from tests.support.restoring import tree_files, write_tree


def test_case_c1_temporaries_and_dot_files_are_never_part_of_a_tree(tmp_path: Path) -> None:
    rubbish = {
        "inductor/ab/.123.456.tmp": b"half",
        "inductor/ab/cab.tmp": b"half",
        "inductor/ab/x.json.tmp.pid_7_ab": b"half",
        "inductor/.hidden/file": b"x",
        "inductor/ab/__pycache__/cab.cpython-311.pyc": b"x",
        "triton/0/tmp.pid_12_ab/k.cubin": b"half",
        ".lease": b"",
        ".cachepipe/marker.json": b"{}",
    }
    write_tree(tmp_path, {**rubbish, "inductor/ab/cab.py": b"good"})
    assert [file.path for file in list_tree(tmp_path)] == ["inductor/ab/cab.py"]


def test_case_c15_locks_are_never_part_of_a_tree(tmp_path: Path) -> None:
    write_tree(tmp_path, {"inductor/locks/abc.lock": b"", "inductor/ab/x.lock": b"", "inductor/ab/cab.py": b"good"})
    assert [file.path for file in list_tree(tmp_path)] == ["inductor/ab/cab.py"]


def test_links_and_special_files_are_left_out(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a": b"a"})
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "folder-link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert [file.path for file in list_tree(tmp_path)] == ["a"]


def test_modes_are_0644_or_0755_whatever_the_file_has(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a": b"", "b": b""})
    (tmp_path / "a").chmod(0o6770)
    (tmp_path / "b").chmod(0o600)
    assert [file.mode for file in list_tree(tmp_path)] == [0o755, 0o644]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("inductor/fxgraph/ab/fab/hash", "fxgraph"),
        ("inductor/aotautograd/aab/hash", "aotautograd"),
        ("inductor/cd/ccd.so", "native"),
        ("inductor/cd/ccd.main.py", "wrapper"),
        ("inductor/cache/1f", "tuning"),
        ("inductor/cd/ccd.best_config", "tuning"),
        ("inductor/cd/ccd.kernel_perf", "tuning"),
        ("triton/0/KEY/k.cubin", "triton"),
        ("triton/0/KEY/launcher.so", "triton"),
        ("inductor/cd/ccd.cpp", "other"),
    ],
)
def test_every_file_has_its_kind(path: str, kind: str) -> None:
    assert kind_of(path) == kind


def test_merged_trees_tell_which_entries_brought_a_file(tmp_path: Path) -> None:
    one = write_tree(tmp_path / "1", {"a": b"same", "b": b"only one"})
    two = write_tree(tmp_path / "2", {"a": b"same", "c": b"only two"})
    serves = merge_trees({0: one, 1: two}, tmp_path / "merged")
    assert serves == {"a": (0, 1), "b": (0,), "c": (1,)}
    assert (tmp_path / "merged/c").read_bytes() == b"only two"


def test_different_bytes_at_one_path_are_refused_by_name(tmp_path: Path) -> None:
    one = write_tree(tmp_path / "1", {"inductor/ab/x.py": b"one"})
    two = write_tree(tmp_path / "2", {"inductor/ab/x.py": b"two"})
    with pytest.raises(IntegrityError, match=r"inductor/ab/x.py of entries 3 and 7: different bytes"):
        merge_trees({3: one, 7: two}, tmp_path / "merged")


def test_timings_of_two_entries_become_their_union(tmp_path: Path) -> None:
    path = "inductor/cache/system"
    one, two = ({"cache": {"mm": {key: {"highest": {"c": 0.5}}}}, "system": {"t": 1}} for key in ("k1", "k2"))
    two["cache"]["mm"]["k1"] = {"highest": {"c": 0.6, "d": float("inf")}}
    sources = {
        number: write_tree(tmp_path / str(number), {path: json.dumps(tree).encode()})
        for number, tree in enumerate((one, two))
    }
    merge_trees(sources, tmp_path / "merged")
    united = json.loads((tmp_path / "merged" / path).read_bytes())
    assert united["cache"]["mm"]["k1"]["highest"] == {"c": 0.5, "d": float("inf")}
    assert united["cache"]["mm"]["k2"]["highest"] == {"c": 0.5}


@pytest.mark.parametrize("other", [b'{"system": "another"}', b"not json"])
def test_timings_of_another_system_are_refused(tmp_path: Path, other: bytes) -> None:
    path = "inductor/cache/system"
    one = write_tree(tmp_path / "1", {path: b'{"system": "one"}'})
    two = write_tree(tmp_path / "2", {path: other})
    with pytest.raises(IntegrityError, match="inductor/cache/system"):
        merge_trees({0: one, 1: two}, tmp_path / "merged")


def test_a_usual_tree_is_listed_whole(tmp_path: Path) -> None:
    files = tree_files("/var/cache/demo")
    assert {file.path for file in list_tree(write_tree(tmp_path, files))} == set(files)


def test_a_cubin_whose_name_triton_cut_is_found_by_its_whole_name(tmp_path: Path) -> None:
    name = "triton_poi_fused_" + "_add_mul" * 20
    folder = tmp_path / "triton" / "0" / "KEY"
    folder.mkdir(parents=True)
    (folder / f"{name[:150]}.cubin").write_bytes(b"code")
    (folder / f"{name[:150]}.json").write_text(json.dumps({"name": name}))
    (folder / f"__grp__{name[:150]}.json").write_text("{}")
    (folder / "short.cubin").write_bytes(b"other")
    (folder / "short.json").write_text(json.dumps({"name": "short"}))
    assert name_cubins_in_full(tmp_path) == (f"triton/0/KEY/{name}.cubin",)
    assert (folder / f"{name}.cubin").read_bytes() == b"code"
    assert name_cubins_in_full(tmp_path) == ()


def test_metadata_that_is_none_is_a_named_error(tmp_path: Path) -> None:
    folder = tmp_path / "triton" / "0" / "KEY"
    folder.mkdir(parents=True)
    (folder / f"{'k' * 150}.json").write_text("[]")
    with pytest.raises(IntegrityError, match="not the metadata of a Triton kernel"):
        name_cubins_in_full(tmp_path)
