"""Every file of a restored tree, damaged in every way between two starts (T-DAMAGE; M9 of the facts is why: torch trusts its files).

Damage that changes a file's size, time or inode is found before the service starts: the folder is made anew, and the service gets
the very bytes that were published. Damage that changes none of them is found by what `verify --files` and `doctor --files` compare.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachepipe.adapters.store import open_store
from cachepipe.adapters.workdir import BuildRoot
from cachepipe.domain.artifact import FileTable
from cachepipe.domain.checkup import FAIL
from cachepipe.domain.marker import PATH as MARKER
from cachepipe.domain.marker import read_marker
from cachepipe.workflows.doctor_files import file_checks
from cachepipe.workflows.fetch import read_file_table, resolve_ref
from cachepipe.workflows.verify import wrong_files
from tests.support.counting import Record
from tests.support.release import Release, run_cachepipe
from tests.support.restoring import Ran, environment, publish_release, run_restore

FULL = pytest.mark.nightly
SAMPLE = ("inductor/cd/ccd0.so", "triton/0/KEY0/__grp__k.json", MARKER)
"""A native object, a file that names the folder, and what says that the folder is whole."""
LEASE = ".lease"
"""Holds no bytes; whoever needs it makes it."""


@dataclass(frozen=True)
class Node:
    """A restored release, and how to start again."""

    base: Path
    words: tuple[str, ...]
    folder: Path
    table: FileTable

    def start(self) -> Ran:
        ran = run_restore(self.base, *self.words, "--", "true", env=environment(self.base))
        assert ran.code == 0
        assert ran.line["folder"] == str(self.folder), ran.line
        return ran

    def files(self) -> dict[str, bytes]:
        """Returns path → bytes of all files, cachepipe's own included; of the marker, which holds times, nothing."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        found = {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}
        return {**found, MARKER: b""} if MARKER in found else found


def made(base: Path, store: str, name: str, channel: str, table: FileTable) -> Node:
    folder = base / "node" / name
    folder.parent.mkdir(mode=0o700)
    return Node(
        base, (store, "--name", name, "--channel", channel, "--dest", str(folder), "--no-attach"), folder, table
    )


@pytest.fixture
def node(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Node:
    """A made-up release of every kind of file, or what a build of the quickstart left."""
    if kind == "small":
        demo = publish_release(tmp_path)
        restored = made(tmp_path, demo.store.url, "demo", "stable", demo.table)
    else:
        release: Release = request.getfixturevalue("quickstart_release")
        store = open_store(release.store)
        table = read_file_table(store, resolve_ref(store, f"{release.name}@candidate").statement)
        restored = made(tmp_path, release.store, release.name, "candidate", table)
    assert restored.start().line["outcome"] == "restored"
    assert wrong_files(BuildRoot(restored.folder), restored.table) == []
    return restored


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flip": flip,
    "gone": Path.unlink,
}


def damaged(folder: Path, names: list[str]) -> Iterator[tuple[str, str, bool]]:
    """Damages file after file in every way; yields file, damage, and whether its bytes are others now."""
    for name in names:
        for kind, damage in DAMAGES.items():
            path = folder / name
            before = path.read_bytes()
            if kind != "flip" or before:
                damage(path)
                yield name, kind, not path.exists() or path.read_bytes() != before


@pytest.mark.parametrize("kind", ["small", pytest.param("quickstart", marks=FULL)])
def test_no_start_uses_a_tree_of_which_a_file_was_damaged(
    node: Node, kind: str, record: Callable[[Record], None]
) -> None:
    whole = node.files()
    cases = restored = 0
    for name, damage, is_other in damaged(node.folder, [*SAMPLE] if kind == "small" else sorted(whole)):
        line = node.start().line
        assert node.files() == whole, f"{name} {damage}: {line}"
        if name != LEASE:
            assert (line["outcome"] == "restored") == is_other, f"{name} {damage}: {line}"
        cases, restored = cases + 1, restored + (line["outcome"] == "restored")
    assert cases >= len(SAMPLE) * len(DAMAGES)
    record({"part": "damage", "store": "local", "files": len(whole), "cases": cases, "restored": restored, "used": 0})


@pytest.mark.parametrize("kind", ["small", pytest.param("quickstart", marks=FULL)])
def test_damage_that_leaves_size_and_time_alone_is_named_by_a_comparison_of_all_files(
    node: Node, kind: str, record: Callable[[Record], None]
) -> None:
    root, found = BuildRoot(node.folder), 0
    for row in node.table.files:
        path, kept = node.folder / row.path, node.base / "kept"
        if not row.size_bytes:
            continue
        shutil.copy2(path, kept)
        before = path.stat()
        flip(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = path.stat()
        assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
        (line,) = wrong_files(root, node.table)
        assert line.startswith(f"file {row.path}: "), line
        (check,) = file_checks(node.folder, read_marker((node.folder / MARKER).read_bytes()))
        assert (check.verdict, check.value.split(": ")[1]) == (FAIL, row.path)
        found += 1
        path.write_bytes(kept.read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found > 5
    look = ["doctor", "--cache-root", str(node.folder.parent), "--files", "--json"]
    assert "as they were restored" in run_cachepipe(*look, env=environment(node.base)).stdout
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = run_cachepipe(*look, env=environment(node.base))
    assert (done.returncode, f"are not as they were restored: {row.path}" in done.stdout) == (18, True), done.stderr
    path.write_bytes(kept.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert node.start().line["outcome"] == "present"
    record({"part": "silent damage", "store": "local", "files": len(node.table.files), "cases": found, "found": found})
