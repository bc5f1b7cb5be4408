"""What only a folder can do wrong: addresses, foreign files, rights, full disks, kills."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.store import open_store
from cachepipe.errors import CachepipeError, NoRoomError, StoreError

CREATE = """
import sys
from cachepipe.adapters.local_store import LocalStore
print(LocalStore(sys.argv[1]).put_if_absent("v1/a", b"x" * 100_000))
"""


def test_a_store_is_named_by_file_address_or_absolute_path(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}").url == f"file://{tmp_path}"
    assert open_store(str(tmp_path)).url == f"file://{tmp_path}"


@pytest.mark.parametrize("url", ["s3:/bucket/prefix", "http://x", "relative/path", "file://relative", ""])
def test_another_kind_of_address_is_refused(url: str) -> None:
    with pytest.raises(StoreError):
        open_store(url)


def test_reading_creates_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "nowhere")
    assert store.get("v1/a", 1) is None
    assert list(store.list("v1/")) == []
    store.delete("v1/a")
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = LocalStore(tmp_path / "file")
    for act in (
        lambda: store.get("v1/a", 1),
        lambda: list(store.list("")),
        lambda: store.put_if_absent("v1/a", b""),
        lambda: store.put_hint("v1/a", b""),
        lambda: store.delete("v1/a"),
    ):
        with pytest.raises(StoreError, match=r"not a (folder|directory)"):
            act()


def test_temporary_files_are_no_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("v1/a", b"x")
    (tmp_path / ".tmp" / "left").write_bytes(b"half")
    (tmp_path / "v1" / ".nfs0001").write_bytes(b"x")
    assert list(store.list("")) == ["v1/a"]
    assert [path.name for path in (tmp_path / ".tmp").iterdir()] == ["left"]


def test_a_folder_is_no_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("v1/a/b", b"x")
    assert store.get("v1/a", 1) is None
    assert store.get("v1/a/b/c", 1) is None


def test_a_key_below_an_object_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("v1/a", b"x")
    with pytest.raises(StoreError):
        store.put_if_absent("v1/a/b", b"x")


@pytest.mark.parametrize(("point", "is_there"), [("store.before_link", False), ("store.after_link", True)])
def test_a_kill_leaves_all_of_an_object_or_nothing(tmp_path: Path, point: str, is_there: bool) -> None:
    environment = {**os.environ, "CACHEPIPE_FAILPOINT": point}
    ran = subprocess.run([sys.executable, "-c", CREATE, str(tmp_path)], env=environment, check=False)
    assert ran.returncode == -9
    store = LocalStore(tmp_path)
    assert store.get("v1/a", 200_000) == (b"x" * 100_000 if is_there else None)
    assert list(store.list("")) == (["v1/a"] if is_there else [])
    assert store.put_if_absent("v1/a", b"y") is not is_there


@pytest.mark.parametrize(
    ("number", "second", "kind", "words"),
    [
        (errno.ENOSPC, None, NoRoomError, "full"),
        (errno.EDQUOT, None, NoRoomError, "full"),
        (errno.EACCES, None, StoreError, "permission denied"),
        (errno.EIO, None, StoreError, "input/output error"),
        (errno.EPERM, "other", StoreError, "no hard links"),
        (errno.EOPNOTSUPP, "other", StoreError, "no hard links"),
    ],
)
def test_errors_of_the_system_are_told_in_our_words(
    tmp_path: Path, number: int, second: str | None, kind: type[CachepipeError], words: str
) -> None:
    error = OSError(number, os.strerror(number), "one", None, second)
    told = LocalStore(tmp_path)._translated(error, "v1/a")
    assert type(told) is kind
    assert words in str(told)
    assert "v1/a" in str(told)


def test_a_full_disk_is_no_room_and_leaves_nothing() -> None:
    # a limit on file sizes stands for the full disk: the write fails in the middle
    code = (
        "import resource,signal,sys,tempfile\n"
        "from cachepipe.adapters.local_store import LocalStore\n"
        "from cachepipe.errors import NoRoomError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    store = LocalStore(folder)\n"
        "    try:\n"
        "        store.put_if_absent('v1/a', b'x' * 5000)\n"
        "    except NoRoomError:\n"
        "        import os\n"
        "        print(list(store.list('')), os.listdir(folder + '/.tmp'))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "[] []\n"


def test_with_its_last_object_a_folder_goes_too_but_never_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for key in ("v1/a/b/c", "v1/a/d"):
        store.put_if_absent(key, b"x")
    store.delete("v1/a/b/c")
    assert not (tmp_path / "store/v1/a/b").exists() and (tmp_path / "store/v1/a").exists()
    store.delete("v1/a/d")
    assert (tmp_path / "store").is_dir() and not (tmp_path / "store/v1").exists()


def _make_and_remove(root: str, writer: int, rounds: int) -> None:
    store = LocalStore(root)
    for number in range(rounds):
        key = f"v1/shared/folder/{writer}-{number}"
        assert store.put_if_absent(key, b"x")
        assert store.get(key, 1) == b"x"
        store.delete(key)


def test_writers_into_a_folder_that_deletions_take_away_never_fail(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_make_and_remove, args=(str(tmp_path), number, 150)) for number in range(3)]
    for writer in writers:
        writer.start()
    store = LocalStore(tmp_path)
    store.put_if_absent("v1/zzz/last", b"x")
    while any(writer.is_alive() for writer in writers):
        assert "v1/zzz/last" in list(store.list("v1/")), "a folder that vanishes hides no other object"
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
