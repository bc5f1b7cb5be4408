from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachepipe.adapters import openwatch
from cachepipe.adapters.openwatch import OpenWatch


def tree(tmp_path: Path) -> Path:
    for name in ("inductor/ab/x.py", "inductor/ab/y.py", "triton/0/KEY/k.cubin", "top"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_files_that_another_process_opened_are_named_and_others_are_not(tmp_path: Path) -> None:
    root = tree(tmp_path)
    with OpenWatch(root) as watch:
        code = "import sys; [open(path).close() for path in sys.argv[1:]]"
        names = ["inductor/ab/x.py", "triton/0/KEY/k.cubin"]
        subprocess.run([sys.executable, "-c", code, *(str(root / name) for name in names)], check=True)
        os.listdir(root / "inductor/ab")
        os.stat(root / "top")
    assert watch.opened() == frozenset(names)


def test_a_folder_that_appears_is_watched_and_what_it_holds_counts_as_opened(tmp_path: Path) -> None:
    root = tree(tmp_path)
    with OpenWatch(root) as watch:
        (root / "inductor/new/deep").mkdir(parents=True)
        (root / "inductor/new/deep/z").write_text("")
    assert watch.opened() == frozenset({"inductor/new/deep/z"})


def test_a_file_that_is_renamed_into_place_counts_as_opened(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (tmp_path / "outside").write_text("group")
    with OpenWatch(root) as watch:
        (tmp_path / "outside").rename(root / "triton/0/KEY/__grp__k.json")
    assert "triton/0/KEY/__grp__k.json" in (watch.opened() or ())


def test_folders_that_vanish_at_once_do_not_end_the_watch(tmp_path: Path) -> None:
    root = tree(tmp_path)
    code = """
import os, sys
for number in range(300):
    folder = os.path.join(sys.argv[1], f"tmp.{number}")
    os.makedirs(os.path.join(folder, "deep"))
    os.rmdir(os.path.join(folder, "deep"))
    os.rmdir(folder)
open(os.path.join(sys.argv[1], "k.cubin")).close()
"""
    with OpenWatch(root) as watch:
        subprocess.run([sys.executable, "-c", code, str(root / "triton/0/KEY")], check=True)
    assert "triton/0/KEY/k.cubin" in (watch.opened() or ())


def test_a_watch_that_fails_keeps_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path)

    def refuse(path: object) -> object:
        raise PermissionError(13, "no")

    with OpenWatch(root) as watch:
        monkeypatch.setattr(openwatch.os, "scandir", refuse)
        (root / "new").mkdir()
        (root / "new" / "file").write_text("")
    assert watch.opened() is None


def test_an_overflow_means_that_everything_is_kept(tmp_path: Path) -> None:
    root = tree(tmp_path)
    with OpenWatch(root) as watch:
        watch._take(openwatch._HEADER.pack(-1, openwatch.IN_Q_OVERFLOW, 0, 0))
    assert watch.opened() is None


def test_without_inotify_everything_is_kept(tmp_path: Path) -> None:
    class OldLibc:
        pass

    watch = OpenWatch(tree(tmp_path))
    watch._libc = OldLibc()  # type: ignore[assignment]
    with watch:
        pass
    assert watch.opened() is None


@pytest.mark.parametrize("count", [3000])
def test_many_opens_are_all_seen(tmp_path: Path, count: int) -> None:
    for number in range(count):
        (tmp_path / f"f{number}").touch()
    with OpenWatch(tmp_path) as watch:
        for number in range(count):
            (tmp_path / f"f{number}").open().close()
    assert watch.opened() == frozenset(f"f{number}" for number in range(count))
