"""Attacks on folders by another user of the node (T-DIR) that need timing, or a place where both may write."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from cachepipe.adapters import cachedir, lease
from cachepipe.adapters.cachedir import Need
from cachepipe.adapters.materialise import materialise
from cachepipe.domain.artifact import Blob, FileRow, FileTable, Segment
from cachepipe.errors import CachepipeError, IntegrityError, UnsafePathError
from cachepipe.workflows.place import candidates, reserve

OTHER = 65534
SMALL = Need(0, 0)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is: everyone may write, and only owners may rename."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


def soon() -> float:
    return time.monotonic() + 5


# --- places that others can change ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o1777, 0o1770, 0o755])
def test_a_sticky_folder_of_another_user_is_no_safe_ancestor(shared: Path, mode: int) -> None:
    (shared / "a").mkdir(mode=0o700)
    shared.chmod(mode)
    os.chown(shared, OTHER, OTHER)
    with pytest.raises(UnsafePathError, match=f"owned by uid {OTHER}, neither root nor us"):
        cachedir.check_private(str(shared / "a"))


@pytest.mark.parametrize("mode", [0o775, 0o2775, 0o757, 0o722])
def test_an_ancestor_that_a_group_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "team/a").mkdir(parents=True, mode=0o700)
    os.chown(tmp_path / "team", -1, OTHER)
    (tmp_path / "team").chmod(mode)
    with pytest.raises(UnsafePathError, match="team: writable by others"):
        cachedir.check_private(str(tmp_path / "team/a"))


def test_a_folder_made_below_a_set_group_id_is_private_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    os.chown(tmp_path / "team", -1, OTHER)
    (tmp_path / "team").chmod(0o2755)
    cachedir.make_private(str(tmp_path / "team/a/b"))
    assert (tmp_path / "team/a").stat().st_gid == OTHER
    assert stat.S_IMODE((tmp_path / "team/a/b").stat().st_mode) & 0o777 == 0o700


def test_a_way_up_and_down_again_is_looked_at_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "open/in").mkdir(parents=True)
    (tmp_path / "mine/a").mkdir(parents=True, mode=0o700)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "way").symlink_to("open/in/../../mine")
    with pytest.raises(UnsafePathError, match="open: writable by others"):
        cachedir.check_private(str(tmp_path / "way/a"))


# --- swapped between two calls -------------------------------------------------------------------------------------------


def swap_for_a_link(path: Path, target: Path) -> None:
    os.rename(path, f"{path}.aside")
    path.symlink_to(target)


def test_a_folder_that_is_swapped_after_its_ancestors_were_checked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir(mode=0o755)
    real = cachedir.check_ancestors

    def swapped(folder: str) -> None:
        real(folder)
        swap_for_a_link(tmp_path / "mine", tmp_path / "theirs")

    monkeypatch.setattr(cachedir, "check_ancestors", swapped)
    with pytest.raises(UnsafePathError, match="not a folder of its own"):
        cachedir.check_private(str(tmp_path / "mine"))
    assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o755


@pytest.mark.parametrize("kind", ["open folder", "their folder", "link", "file"])
def test_what_someone_makes_just_before_us_is_checked_like_any_other(
    shared: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    real, wanted = os.mkdir, str(shared / "cache")

    def make(path: str) -> None:
        if kind == "link":
            os.symlink(shared, path)
        elif kind == "file":
            Path(path).touch()
        else:
            real(path)
            os.chmod(path, 0o777 if kind == "open folder" else 0o700)
            os.chown(path, *((OTHER, OTHER) if kind == "their folder" else (-1, -1)))

    def raced(path: str, mode: int = 0o777) -> None:
        if path == wanted:
            make(path)
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", raced)
    with pytest.raises(UnsafePathError):
        cachedir.make_private(wanted)


def filled(target: Path, on_fetch: Callable[[], None]) -> None:
    """Writes `d/a` into the target; something happens while its pack is fetched."""
    data = zstandard.ZstdCompressor(write_checksum=True).compress(b"0123456789")
    pack = Blob(hashlib.sha256(data).hexdigest(), len(data), 10)
    row = FileRow("d/a", 0o644, 10, "0" * 64, (Segment(0, 0, 10),), (0,), False)

    def fetch(_digest: str) -> bytes:
        on_fetch()
        return data

    materialise(fetch, (pack,), FileTable("/r", (row,)), target, "/r", deadline=soon())


def test_a_target_that_is_swapped_while_packs_are_fetched_is_still_the_one_that_was_checked(tmp_path: Path) -> None:
    for name in ("target", "theirs"):
        (tmp_path / name).mkdir(mode=0o700)
    filled(tmp_path / "target", lambda: swap_for_a_link(tmp_path / "target", tmp_path / "theirs"))
    assert not list((tmp_path / "theirs").iterdir())
    assert (tmp_path / "target.aside/d/a").read_bytes() == b"0123456789"


def test_a_file_that_is_planted_while_packs_are_fetched_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "outside").write_bytes(b"mine")

    def plant() -> None:
        (tmp_path / "target/d").mkdir(exist_ok=True)  # it is made while packs are fetched: before this one or after
        os.link(tmp_path / "outside", tmp_path / "target/d/a")

    with pytest.raises(IntegrityError, match="something else stands there"):
        filled(tmp_path / "target", plant)
    assert (tmp_path / "outside").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_final_folder_that_became_something_else_is_not_replaced(tmp_path: Path, kind: str) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/x").touch()
    if kind == "link":
        (tmp_path / "final").symlink_to(tmp_path / "theirs")
    else:
        (tmp_path / "final").touch()
    with pytest.raises(UnsafePathError, match="cannot be replaced"):
        cachedir.swap_in(str(tmp_path / "new"), str(tmp_path / "final"), soon())
    assert not list((tmp_path / "theirs").iterdir())


# --- hard links ----------------------------------------------------------------------------------------------------------


def test_a_lock_that_is_a_hard_link_to_a_file_of_ours_leaves_it_as_it_was(shared: Path) -> None:
    """Where the kernel allows it, anybody can give a file of ours a second name."""
    precious = shared / "precious"
    precious.write_bytes(b"mine")
    precious.chmod(0o640)
    os.link(precious, shared / ".demo.lock")
    reserve(str(shared / "demo"), SMALL, soon()).release()
    assert (precious.read_bytes(), stat.S_IMODE(precious.stat().st_mode)) == (b"mine", 0o640)


@pytest.mark.parametrize("kind", ["their file", "their hard link", "link", "folder"])
def test_a_lock_that_is_not_a_file_of_ours_is_refused_and_left_alone(shared: Path, kind: str) -> None:
    path, precious = shared / ".demo.lock", shared / "precious"
    precious.write_bytes(b"theirs")
    os.chown(precious, OTHER, OTHER)
    {
        "their file": lambda: os.rename(precious, path),
        "their hard link": lambda: os.link(precious, path),
        "link": lambda: path.symlink_to(precious),
        "folder": path.mkdir,
    }[kind]()
    with pytest.raises(CachepipeError):
        lease.lock_file(str(path), soon())
    if kind != "folder":
        assert path.read_bytes() == b"theirs"


# --- network file systems ------------------------------------------------------------------------------------------------


def test_on_a_network_file_system_nothing_is_ever_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of one host may not be seen by another there: the folder of this content alone is used."""
    monkeypatch.setattr(cachedir, "is_on_network", lambda folder: folder == "/mnt/nfs")
    found = candidates("/mnt/nfs/demo", "demo.0123456789ab", True, {})
    assert "/mnt/nfs/demo" not in found
    assert found[0] == "/mnt/nfs/demo.0123456789ab"
    assert candidates("/mnt/nfs/demo", "demo.0123456789ab", False, {}) == found[:1]
