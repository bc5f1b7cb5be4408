"""A part of a real cache tree: BERT tuned with torch 2.11.0 and triton 3.6.0 on an H200, built at /var/cache/cachepipe/smoke.

One kernel whose name Triton cuts, with its group file; one that torch launches by itself; Triton's driver and launcher
objects; three tuning records with a wrapper.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachepipe.adapters.cachetree import TRITON_NAME_CHARS, kind_of, list_tree, name_cubins_in_full
from cachepipe.adapters.packs import moved_copy
from cachepipe.runtime.backports import _is_config
from cachepipe.workflows.entry_steps import used_files
from tests.unit.adapters.test_packs import pack, unpack

ROOT = "/var/cache/cachepipe/smoke"
ARCHIVE = Path(__file__).parents[2] / "fixtures" / "gpu" / "h200-bert-kernels.tar.gz"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "tree", filter="data")
    return tmp_path / "tree"


def groups(tree: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    for path in sorted(tree.glob("triton/0/*/__grp__*.json")):
        yield path, json.loads(path.read_text())["child_paths"]


def test_every_file_of_the_tree_has_its_kind(tree: Path) -> None:
    kinds = [kind_of(file.path) for file in list_tree(tree)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"tuning": 3, "wrapper": 1, "triton": 17}


def test_a_restored_kernel_at_another_root_has_every_member_of_its_group(tree: Path, tmp_path: Path) -> None:
    packed = pack(tree, tmp_path / "blobs", root=ROOT)
    unpack(packed, tmp_path / "blobs", tmp_path / "there", str(tmp_path / "there"))
    ((path, members),) = groups(tmp_path / "there")
    assert len(members) >= 7
    assert all(Path(member).is_file() and Path(member).parent == path.parent for member in members.values())


def test_a_copied_tree_that_was_moved_has_every_member_too_and_the_original_is_left_alone(
    tree: Path, tmp_path: Path
) -> None:
    moved_copy(tree, ROOT, tmp_path / "copy")
    ((path, members),) = groups(tmp_path / "copy")
    assert all(Path(member).is_file() and Path(member).parent == path.parent for member in members.values())
    ((_, before),) = groups(tree)
    assert all(member.startswith(f"{ROOT}/triton/0/") for member in before.values())
    for file in list_tree(tree):
        if "__grp__" not in file.path:
            assert (tmp_path / "copy" / file.path).read_bytes() == (tree / file.path).read_bytes()


def test_the_cubin_of_a_kernel_with_a_long_name_is_found_by_torchs_launcher(tree: Path) -> None:
    (made,) = name_cubins_in_full(tree)
    folder, _, name = made.rpartition("/")
    (metadata,) = (path for path in (tree / folder).glob("triton_*.json"))
    assert name == f"{json.loads(metadata.read_text())['name']}.cubin" and len(name) > TRITON_NAME_CHARS + 6
    assert (tree / made).read_bytes() == metadata.with_suffix(".cubin").read_bytes()


def test_what_a_start_opens_keeps_launcher_and_driver_objects(tree: Path) -> None:
    files = [file.path for file in list_tree(tree)]
    opened = [path for path in files if path.endswith((".so", ".cubin"))]
    kept = used_files(files, opened)
    assert sum(path.endswith(".so") for path in kept) == 2
    # the parts of a kernel belong together, the group file among them only if Triton opens it
    assert not [path for path in set(files) - set(kept) if "/triton_" in path]


@pytest.mark.parametrize(("folder", "xblock", "warps"), [("fa", 1024, 8), ("i7", 1, 8), ("qx", 4096, 1)])
def test_a_real_record_is_that_of_its_winner_and_of_no_other_config(
    tree: Path, folder: str, xblock: int, warps: int
) -> None:
    (path,) = (tree / "inductor" / folder).glob("*.best_config")
    record = json.loads(path.read_text())
    assert record["found_by_coordesc"] is True and len(record["configs_hash"]) == 64

    def config(**changes: int) -> SimpleNamespace:
        facts = {"xblock": xblock, "num_warps": warps, "num_stages": 1, **changes}
        return SimpleNamespace(
            kwargs={"XBLOCK": facts["xblock"]}, num_warps=facts["num_warps"], num_stages=facts["num_stages"]
        )

    assert _is_config(config(), record)
    assert not any(_is_config(config(**{name: 2 * record[key]}), record)
                   for name, key in (("xblock", "XBLOCK"), ("num_warps", "num_warps"), ("num_stages", "num_stages")))  # fmt: skip
