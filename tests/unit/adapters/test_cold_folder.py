"""Folders of cold starts: new, private, held by who uses them, and removed when nobody does."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachepipe.adapters import cold_folder as module
from cachepipe.adapters.cachedir import Need
from cachepipe.adapters.cold_folder import ColdFolder, cold_folder, sweep_cold
from cachepipe.adapters.lease import NAME, Lease
from cachepipe.errors import NoRoomError

LATER = time.time() + 7200


def made(place: Path) -> ColdFolder:
    found = cold_folder([str(place)])
    assert found is not None
    (Path(found.path) / "inductor" / "ab").mkdir(parents=True)
    (Path(found.path) / "inductor" / "ab" / "kernel.so").write_bytes(b"x")
    return found


def freed(folder: ColdFolder) -> Path:
    assert folder.lease is not None
    folder.lease.close()
    return Path(folder.path)


def test_a_cold_folder_is_new_private_and_held_every_time(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad").chmod(0o777)
    places = [str(tmp_path / "bad"), str(tmp_path / "good")]
    one, two = cold_folder(places), cold_folder(places)
    assert one is not None and two is not None and one.path != two.path
    assert os.path.dirname(one.path) == str(tmp_path / "good")
    assert (os.listdir(one.path), stat.S_IMODE(os.stat(one.path).st_mode)) == ([NAME], 0o700)
    assert not Lease.is_free(one.path)
    beside = cold_folder(places[:1])
    assert beside is not None and os.path.dirname(beside.path).startswith(f"{places[0]}.")
    assert cold_folder(["/proc/none"]) is None


def test_old_folders_that_nobody_holds_are_removed_and_no_others(tmp_path: Path) -> None:
    dead, used, young = freed(made(tmp_path)), made(tmp_path), freed(made(tmp_path))
    unheld = cold_folder([str(tmp_path)], is_held=False)
    assert unheld is not None
    os.utime(young, (LATER, LATER))
    (tmp_path / "cold.file").write_text("no folder")
    (tmp_path / "cold.link").symlink_to(dead)
    (tmp_path / "demo.0123").mkdir()
    (dead / "out").symlink_to(young)
    sweep_cold([str(tmp_path)], LATER)
    kept = {Path(used.path).name, young.name, Path(unheld.path).name, "cold.file", "cold.link", "demo.0123"}
    assert set(os.listdir(tmp_path)) == kept
    assert (young / "inductor" / "ab" / "kernel.so").exists(), "a link in a removed folder is not followed"
    freed(used)


def test_a_folder_is_kept_while_the_command_that_inherited_its_lease_lives(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert folder.lease is not None
    folder.lease.make_inheritable()
    words = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as service:
        assert service.stdin is not None and service.stdout is not None
        service.stdout.readline()
        freed(folder)
        sweep_cold([str(tmp_path)], LATER)
        assert os.path.isdir(folder.path)
        service.stdin.close()
        service.wait(30)
    sweep_cold([str(tmp_path)], LATER)
    assert not os.path.exists(folder.path)


def test_a_removal_that_was_cut_short_goes_on_at_the_next_start(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"more{number}").mkdir()
    folder = freed(made(tmp_path))
    for number in range(5):
        (folder / f"file{number}").write_bytes(b"x")
    sweep_cold([str(tmp_path)], LATER, limit_s=0.0)
    (gone,) = [name for name in os.listdir(tmp_path) if name.startswith("gone.")]
    assert os.listdir(tmp_path / gone)
    sweep_cold([str(tmp_path)], time.time())
    assert not (tmp_path / gone).exists()


def test_nothing_is_swept_where_locks_do_not_count_or_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = freed(made(tmp_path))
    monkeypatch.setattr(module, "is_on_network", lambda place: True)
    sweep_cold([str(tmp_path), str(tmp_path / "absent")], LATER)
    assert dead.exists()
    monkeypatch.undo()
    tmp_path.chmod(0o777)
    sweep_cold([str(tmp_path)], LATER)
    assert dead.exists()
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("taken", ["folder of others", "file"])
def test_what_lies_beside_a_taken_name_is_swept_and_only_what_was_made_there(tmp_path: Path, taken: str) -> None:
    place = tmp_path / "cachepipe-0"
    if taken == "file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777)
    backup, link = tmp_path / "cachepipe-0.backup", tmp_path / f"cachepipe-0.{'0' * 16}"
    for folder in (backup, backup / "cold.1"):
        folder.mkdir()
        folder.chmod(0o755)
    link.symlink_to(backup)
    dead = freed(made(place))
    again = cold_folder([str(place)])
    assert again is not None and Path(again.path).parent == dead.parent, "an earlier one is found again"
    sweep_cold([str(place)], LATER)
    assert not dead.exists() and os.path.isdir(again.path)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (backup, backup / "cold.1")] == [0o755, 0o755]


def test_nothing_is_left_beside_a_place_that_is_ours_and_full_or_where_no_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, taken = tmp_path / "ours", tmp_path / "taken"
    ours.mkdir(mode=0o700)
    taken.write_text("")

    def full(folder: str, need: Need) -> None:
        raise NoRoomError(f"{folder}: full")

    monkeypatch.setattr(module, "check_usable", full)
    found = cold_folder([str(taken), str(ours)])
    assert found is not None and os.path.dirname(found.path) == str(ours)
    assert sorted(os.listdir(tmp_path)) == ["ours", "taken"]


def test_beside_a_taken_name_in_a_folder_that_cannot_be_listed_a_sweep_raises_nothing_and_a_start_has_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    list_folder = os.scandir

    def refuse(path: str) -> object:  # root may list every folder
        if path == str(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    sweep_cold([str(tmp_path / "taken")], LATER)
    found = cold_folder([str(tmp_path / "taken")])
    assert found is not None and os.path.dirname(found.path).startswith(f"{tmp_path}/taken.")
