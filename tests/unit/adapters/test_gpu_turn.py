"""Builds share a GPU, except while one of them tunes; who waits is not overtaken for ever."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cachepipe.adapters.gpu_turn import gpu_turn
from cachepipe.errors import NoRoomError, UnsafePathError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_several_share_and_another_gpu_is_another_turn() -> None:
    with gpu_turn("GPU-1", is_alone=False), gpu_turn("GPU-1", is_alone=False), gpu_turn("GPU-2", is_alone=True):
        pass


def test_one_that_tunes_waits_for_those_that_share_and_later_ones_wait_for_it() -> None:
    order: list[str] = []
    waiting, done = threading.Event(), threading.Event()

    def alone() -> None:
        with gpu_turn("GPU-1", is_alone=True, on_wait=waiting.set):
            order.append("alone")

    def later() -> None:
        with gpu_turn("GPU-1", is_alone=False, on_wait=done.set):
            order.append("later")

    tuner, sharer = threading.Thread(target=alone), threading.Thread(target=later)
    with gpu_turn("GPU-1", is_alone=False):
        tuner.start()
        assert waiting.wait(30)
        sharer.start()
        assert done.wait(30)
        order.append("first")
    tuner.join(30)
    sharer.join(30)
    assert order == ["first", "alone", "later"]


def test_one_that_would_share_says_that_it_waits_for_one_that_tunes() -> None:
    waiting, has_turn = threading.Event(), threading.Event()

    def later() -> None:
        with gpu_turn("GPU-1", is_alone=False, on_wait=waiting.set):
            has_turn.set()

    sharer = threading.Thread(target=later)
    with gpu_turn("GPU-1", is_alone=True):
        sharer.start()
        is_told = waiting.wait(30)
        assert not has_turn.is_set()
    sharer.join(30)
    assert is_told and has_turn.is_set()


def lock_of(folder: Path, uuid: str = "GPU-1") -> Path:
    return folder / f"cachepipe-{os.getuid()}-{uuid}.lock"


@pytest.mark.parametrize("gate", ["", ".gate"])
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path.symlink_to("/etc/hostname"), "symbolic links"),
        (lambda path: path.mkdir(), "is a directory"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.parent.rename(path.parent.with_name("gone")), "no such file or directory"),
        (lambda path: (path.parent.rename(path.parent.with_name("gone")), path.parent.touch()), "not a directory"),
    ],
    ids=["link", "folder", "fifo", "no folder", "no folder but a file"],
)
def test_what_stands_in_the_locks_place_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], object], words: str, gate: str
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    prepare(lock_of(folder, f"GPU-1{gate}"))
    with pytest.raises(UnsafePathError, match=words) as caught, gpu_turn("GPU-1", is_alone=True):
        pass
    assert str(folder) in caught.value.path and "TMPDIR" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_that_another_user_made_in_the_locks_place_is_no_turn(tmp_path: Path) -> None:
    path = lock_of(tmp_path)
    path.touch(0o666)
    os.chown(path, 65534, 65534)
    with pytest.raises(UnsafePathError, match="belongs to user 65534"), gpu_turn("GPU-1", is_alone=False):
        pass


def test_without_any_temporary_folder_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(UnsafePathError, match="TMPDIR: no usable temporary directory"), gpu_turn("GPU-1", True):
        pass


def test_a_file_system_without_locks_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    words = r"cannot be locked \(No locks available\)"
    with pytest.raises(UnsafePathError, match=words) as caught, gpu_turn("GPU-1", is_alone=False):
        pass
    assert caught.value.path == str(tmp_path) and "TMPDIR" in caught.value.hint


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.open", full)
    with pytest.raises(NoRoomError, match="no space left on device"), gpu_turn("GPU-1", is_alone=True):
        pass
