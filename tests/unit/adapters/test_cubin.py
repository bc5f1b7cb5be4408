"""Files of one kernel that was compiled from two places."""

from __future__ import annotations

import json
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest

from cachepipe.adapters.cachetree import merge_trees
from cachepipe.adapters.cubin import running_digest
from cachepipe.errors import IntegrityError
from tests.support.restoring import write_tree

KERNELS = Path(__file__).parents[2] / "fixtures" / "gpu" / "one-kernel-from-two-files.tar.gz"
"""`add`, compiled for sm_90 by triton 3.6.0 from `a/mod.py` and from `bbbb/modother.py`."""


@pytest.fixture
def trees(tmp_path: Path) -> dict[int, Path]:
    with tarfile.open(KERNELS) as archive:
        archive.extractall(tmp_path, filter="data")
    return {0: tmp_path / "one", 1: tmp_path / "two"}


def cubins(trees: dict[int, Path]) -> list[bytes]:
    return [path.read_bytes() for tree in trees.values() for path in tree.rglob("add.cubin")]


def test_a_kernel_of_two_entries_compiled_from_two_files_is_one_kernel(trees: dict[int, Path], tmp_path: Path) -> None:
    one, two = cubins(trees)
    assert one != two
    serves = merge_trees(trees, tmp_path / "merged")
    assert {path.rpartition(".")[2] for path in serves} == {"cubin", "json", "llir", "ptx", "source", "ttgir", "ttir"}
    assert set(serves.values()) == {(0, 1)}
    for path in serves:
        assert (tmp_path / "merged" / path).read_bytes() == (trees[0] / path).read_bytes()


def sections(cubin: bytes) -> dict[str, tuple[int, int]]:
    start, size, number, naming = (*struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58))
    rows = [struct.unpack_from("<II QQQQ", cubin, start + index * size) for index in range(number)]
    names = cubin[rows[naming][4] :]
    return {names[row[0] :].partition(b"\0")[0].decode(): (row[4], row[5]) for row in rows}


@pytest.mark.parametrize(
    "section", [".text.add", ".nv.info", ".nv.info.add", ".nv.constant0.add", ".symtab", ".strtab"]
)
def test_one_bit_of_what_runs_makes_it_another_kernel(trees: dict[int, Path], tmp_path: Path, section: str) -> None:
    (path,) = trees[1].rglob("add.cubin")
    data = bytearray(path.read_bytes())
    offset, size = sections(bytes(data))[section]
    data[offset + size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"add\.cubin of entries 0 and 1: different bytes"):
        merge_trees(trees, tmp_path / "merged")


def test_another_architecture_makes_it_another_kernel(trees: dict[int, Path]) -> None:
    one = bytearray(cubins(trees)[0])
    before = running_digest(bytes(one))
    one[48] ^= 1
    assert running_digest(bytes(one)) not in (before, None)


def test_what_is_no_cubin_is_never_the_same_kernel(trees: dict[int, Path], tmp_path: Path) -> None:
    whole = cubins(trees)[0]
    cut = [whole[:length] for length in (0, 3, 4, 63, 64, 65, len(whole) // 2, len(whole) - 1)]
    broken = [b"\x7fELF" + b"\xff" * 60, whole[:40] + b"\xff" * 8 + whole[48:], b"MZ" + whole[2:]]
    assert [running_digest(data) for data in (*cut, *broken)] == [None] * 11
    for number, tree in enumerate(trees.values()):
        (path,) = tree.rglob("add.cubin")
        path.write_bytes(whole[: len(whole) // 2 + number])
    with pytest.raises(IntegrityError, match="different bytes"):
        merge_trees(trees, tmp_path / "merged")


def test_launch_facts_that_differ_are_refused(trees: dict[int, Path], tmp_path: Path) -> None:
    (path,) = trees[1].rglob("add.json")
    path.write_text(path.read_text().replace('"num_warps": 4', '"num_warps": 8'))
    with pytest.raises(IntegrityError, match=r"add\.json of entries 0 and 1: different bytes"):
        merge_trees(trees, tmp_path / "merged")


SOURCE = (
    '#include <stdio.h>\nint check(int code) { if (code) fprintf(stderr, "%s:%d", __FILE__, __LINE__); return code; }\n'
)


def test_a_launcher_that_was_compiled_in_two_folders_is_one_launcher(tmp_path: Path) -> None:
    trees = {}
    for number, name in enumerate(("tmpabc", "another-folder")):
        folder = tmp_path / name
        made = tmp_path / f"tree{number}" / "triton" / "0" / "KEY" / "__triton_launcher.cpython-312-x86_64-linux-gnu.so"
        made.parent.mkdir(parents=True)
        folder.mkdir()
        (folder / "main.c").write_text(SOURCE)
        subprocess.run(["gcc", "-O3", "-shared", "-fPIC", folder / "main.c", "-o", made], check=True)
        trees[number] = tmp_path / f"tree{number}"
    (path,) = merge_trees(trees, tmp_path / "merged")
    assert (trees[0] / path).read_bytes() != (trees[1] / path).read_bytes()
    assert (tmp_path / "merged" / path).read_bytes() == (trees[0] / path).read_bytes()


def record(choice: int, hashed: str = "h", took: int = 1) -> bytes:
    tree = {"XBLOCK": choice, "num_warps": 4, "configs_hash": hashed, "found_by_coordesc": True, "time_taken_ms": took}
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("path", "one", "two"),
    [
        ("inductor/ab/x.best_config", record(64), record(64, took=2)),
        ("inductor/ab/x.kernel_perf", b"0.25", b"0.5"),
        ("inductor/ab/x.kernel_perf", b"0.25 inf", b"0.5 0.1"),
    ],
)
def test_how_long_a_search_took_is_no_difference(tmp_path: Path, path: str, one: bytes, two: bytes) -> None:
    trees = {number: write_tree(tmp_path / str(number), {path: data}) for number, data in enumerate((one, two))}
    assert merge_trees(trees, tmp_path / "merged") == {path: (0, 1)}
    assert (tmp_path / "merged" / path).read_bytes() == one


@pytest.mark.parametrize(
    ("path", "two"),
    [
        ("inductor/ab/x.best_config", record(64, "other")),
        ("inductor/ab/x.best_config", record(128)),
        ("inductor/ab/x.best_config", b"{}"),
        ("inductor/ab/x.best_config", b"[1]"),
        ("inductor/ab/x.best_config", b"cut"),
        ("inductor/ab/x.kernel_perf", b""),
        ("inductor/ab/x.kernel_perf", b"fast"),
        ("triton/0/KEY/launcher.so", b"other"),
        ("triton/0/KEY/kernel.json", b"{}"),
        ("triton/0/KEY/unknown", b"other"),
        ("inductor/ab/x.so", b"\x7fELF two"),
        ("inductor/ab/x.ptx", b"other"),
    ],
)
def test_other_choices_and_all_else_are_refused(tmp_path: Path, path: str, two: bytes) -> None:
    one = {".kernel_perf": b"0.25", ".so": b"\x7fELF one"}.get(Path(path).suffix, record(64))
    trees = {number: write_tree(tmp_path / str(number), {path: data}) for number, data in enumerate((one, two))}
    with pytest.raises(IntegrityError, match="different bytes"):
        merge_trees(trees, tmp_path / "merged")
