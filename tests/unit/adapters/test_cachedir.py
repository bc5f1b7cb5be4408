"""Private folders (T-DIR): which are accepted, which are refused, and how a tree gets there."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from cachepipe.adapters import cachedir
from cachepipe.adapters.cachedir import Need
from cachepipe.adapters.lease import Lease
from cachepipe.errors import DeadlineError, NoRoomError, UnsafePathError
from cachepipe.workflows.place import candidates, reserve

OTHER = 65534


def folder(path: Path, mode: int = 0o700) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def test_a_private_folder_of_ours_is_accepted(tmp_path: Path) -> None:
    cachedir.check_private(str(folder(tmp_path / "a")))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777, 0o720])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UnsafePathError, match="writable by others"):
        cachedir.check_private(str(folder(tmp_path / "a", mode)))


def test_a_folder_that_others_may_only_read_is_closed(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", 0o755)
    cachedir.check_private(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    os.chown(path, OTHER, OTHER)
    with pytest.raises(UnsafePathError, match=f"owned by uid {OTHER}, we are {os.geteuid()}"):
        cachedir.check_private(str(path))


def test_a_link_to_a_private_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder(tmp_path / "a"))
    with pytest.raises(UnsafePathError, match="not a folder of its own"):
        cachedir.check_private(str(tmp_path / "link"))


@pytest.mark.parametrize("kind", ["file", "fifo", "dangling"])
def test_what_is_no_folder_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    {"file": path.touch, "fifo": lambda: os.mkfifo(path), "dangling": lambda: path.symlink_to("gone")}[kind]()
    with pytest.raises(UnsafePathError):
        cachedir.check_private(str(path))


def test_an_ancestor_that_others_may_write_is_refused(tmp_path: Path) -> None:
    inner = folder(tmp_path / "open/a")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UnsafePathError, match=r"open: writable by others \(mode 0777\)"):
        cachedir.check_private(str(inner))


def test_an_ancestor_of_another_user_is_refused(tmp_path: Path) -> None:
    inner = folder(tmp_path / "theirs/a")
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    with pytest.raises(UnsafePathError, match="neither root nor us"):
        cachedir.check_private(str(inner))


def test_a_sticky_ancestor_of_root_is_accepted(tmp_path: Path) -> None:
    inner = folder(tmp_path / "shared/a")
    (tmp_path / "shared").chmod(0o1777)
    cachedir.check_private(str(inner))


def test_an_ancestor_that_is_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    folder(tmp_path / "real/a")
    (tmp_path / "way").symlink_to(tmp_path / "real")
    os.lchown(tmp_path / "way", OTHER, OTHER)
    with pytest.raises(UnsafePathError, match="way: owned by uid"):
        cachedir.check_private(str(tmp_path / "way/a"))


def test_behind_a_link_of_ours_the_real_ancestors_are_checked_too(tmp_path: Path) -> None:
    folder(tmp_path / "open/real/a")
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "way").symlink_to(tmp_path / "open/real")
    with pytest.raises(UnsafePathError, match="open: writable by others"):
        cachedir.check_private(str(tmp_path / "way/a"))


def test_missing_folders_are_made_private_whatever_the_umask_is(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        cachedir.make_private(str(tmp_path / "var/cache/cachepipe"))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "var/cache/cachepipe").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "var").stat().st_mode) == 0o700


def test_case_c12_no_room_says_how_much_is_missing(tmp_path: Path) -> None:
    need = Need(10**18, 10)
    with pytest.raises(NoRoomError, match=r"wanted 11\d+ bytes, free \d+, missing \d+"):
        cachedir.check_usable(str(tmp_path), need)
    facts = os.statvfs(tmp_path)
    if facts.f_files:
        with pytest.raises(NoRoomError, match=r"not enough (inodes|room): wanted \d+.*, free \d+, missing \d+"):
            cachedir.check_usable(str(tmp_path), Need(0, facts.f_files * 2))


def test_candidates_go_from_the_final_folder_to_scratch(tmp_path: Path) -> None:
    own = f"cachepipe-{os.geteuid()}"
    found = candidates(f"{tmp_path}/demo", "demo.1234", True, {"XDG_CACHE_HOME": "/xdg", "TMPDIR": "/t"})
    assert found == (
        f"{tmp_path}/demo",
        f"{tmp_path}/demo.1234",
        "/xdg/cachepipe/demo.1234",
        f"/t/{own}/demo.1234",
        f"/tmp/{own}/demo.1234",
        f"/dev/shm/{own}/demo.1234",
    )
    assert candidates(f"{tmp_path}/demo", "demo.1234", False, {}) == (f"{tmp_path}/demo",)


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"b', "a\\b", "a\tb"])
def test_a_folder_that_torchs_compiler_command_cannot_name_is_left_for_another(tmp_path: Path, name: str) -> None:
    variables = {"XDG_CACHE_HOME": str(tmp_path / name), "TMPDIR": str(tmp_path / name)}
    assert cachedir.scratch_folders(variables) == cachedir.scratch_folders({})
    with pytest.raises(UnsafePathError, match=r"not printable|torch's compiler command"):
        reserve(str(tmp_path / name / "demo"), Need(0, 0), time.monotonic() + 1)
    assert not (tmp_path / name).exists()
    plain = {"XDG_CACHE_HOME": str(tmp_path / "ö#,;$(x)"), "TMPDIR": ""}
    assert cachedir.scratch_folders(plain)[0] == str(tmp_path / "ö#,;$(x)" / "cachepipe")


def test_relative_folders_of_the_environment_are_not_used() -> None:
    assert (
        candidates("/r/demo", "d", True, {"XDG_CACHE_HOME": "x", "TMPDIR": "t"})[2:]
        == candidates("/r/demo", "d", True, {})[2:]
    )


@pytest.mark.parametrize(
    ("line", "is_network"),
    [
        ("36 35 0:5 / {0} rw - nfs4 server:/x rw", True),
        ("36 35 0:5 / {0} rw shared:1 - fuse.sshfs host:/ rw", True),
        ("36 35 0:5 / {0} rw - ext4 /dev/x rw", False),
        ("36 35 0:5 / {0} rw - fuse.fuse-overlayfs x rw", False),
    ],
)
def test_network_file_systems_are_told_by_their_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, is_network: bool
) -> None:
    text = "1 0 8:1 / / rw - ext4 /dev/root rw\n" + line.format(tmp_path) + "\n"
    (tmp_path / "mountinfo").write_text(text)
    real = open
    monkeypatch.setattr(
        "builtins.open",
        lambda path, *a, **k: real(tmp_path / "mountinfo" if path == "/proc/self/mountinfo" else path, *a, **k),
    )
    assert cachedir.is_on_network(str(tmp_path / "cache")) is is_network


def tree(path: Path) -> Path:
    folder(path / ".cachepipe")
    (path / ".cachepipe/marker.json").write_text(path.name)
    return path


def test_a_tree_appears_by_one_rename(tmp_path: Path) -> None:
    temporary = cachedir.temporary_sibling(str(tmp_path / "demo"))
    assert os.path.basename(temporary).startswith(f"demo.tmp.{os.getpid()}.")
    (Path(temporary) / "a").touch()
    cachedir.swap_in(temporary, str(tmp_path / "demo"), time.monotonic() + 5)
    assert os.listdir(tmp_path / "demo") == ["a"]
    assert not os.path.exists(temporary)


def test_an_empty_folder_is_replaced_and_a_full_one_is_put_aside(tmp_path: Path) -> None:
    for _ in range(3):
        temporary = cachedir.temporary_sibling(str(tmp_path / "demo"))
        (Path(temporary) / "a").touch()
        folder(tmp_path / "demo") if not (tmp_path / "demo").exists() else None
        cachedir.swap_in(temporary, str(tmp_path / "demo"), time.monotonic() + 5)
    assert len([name for name in os.listdir(tmp_path) if name.startswith("demo.old.")]) == 2


def test_nothing_appears_after_the_deadline(tmp_path: Path) -> None:
    temporary = cachedir.temporary_sibling(str(tmp_path / "demo"))
    with pytest.raises(DeadlineError):
        cachedir.swap_in(temporary, str(tmp_path / "demo"), time.monotonic() - 1)
    assert not (tmp_path / "demo").exists()


def test_a_folder_that_a_service_uses_is_not_replaced(tmp_path: Path) -> None:
    lease = Lease.take(str(tree(tmp_path / "demo")), is_shared=True)
    assert lease is not None
    place = reserve(str(tmp_path / "demo"), Need(0, 0), time.monotonic() + 5)
    with pytest.raises(UnsafePathError, match="a running service uses it"):
        place.hold()
    lease.close()
    place.hold()
    place.release()


def test_a_folder_with_foreign_files_is_not_replaced(tmp_path: Path) -> None:
    (tree(tmp_path / "demo") / "id_rsa").touch()
    place = reserve(str(tmp_path / "demo"), Need(0, 0), time.monotonic() + 5)
    with pytest.raises(UnsafePathError, match="holds what cachepipe did not make: `id_rsa`"):
        place.hold()
    place.release()
    assert not (tmp_path / "demo/.lease").exists()


def test_a_second_restore_into_one_folder_waits_no_longer_than_its_deadline(tmp_path: Path) -> None:
    first = reserve(str(tmp_path / "demo"), Need(0, 0), time.monotonic() + 5)
    with pytest.raises(DeadlineError, match="another restore held"):
        reserve(str(tmp_path / "demo"), Need(0, 0), time.monotonic() + 0.1)
    first.release()
    reserve(str(tmp_path / "demo"), Need(0, 0), time.monotonic() + 5).release()


def test_only_old_leftovers_of_this_folder_that_nobody_uses_are_swept(tmp_path: Path) -> None:
    old = time.time() - 2 * cachedir.STALE_S
    for name in ("demo.tmp.1.a", "demo.old.b", "demo.old.used", "demo.tmp.1.young", "demo", "demo2.tmp.1.a"):
        (tree(tmp_path / name) / "f").touch()
        if "young" not in name:
            os.utime(tmp_path / name, (old, old))
    lease = Lease.take(str(tmp_path / "demo.old.used"), is_shared=True)
    os.utime(tmp_path / "demo.old.used", (old, old))
    cachedir.sweep(str(tmp_path / "demo"), time.time())
    assert sorted(os.listdir(tmp_path)) == ["demo", "demo.old.used", "demo.tmp.1.young", "demo2.tmp.1.a"]
    assert lease is not None
    lease.close()


def test_the_write_and_read_test_leaves_nothing(tmp_path: Path) -> None:
    cachedir.write_and_read_test(str(tmp_path))
    assert not os.listdir(tmp_path)
    with pytest.raises(UnsafePathError, match="cannot be written and read"):
        cachedir.write_and_read_test(str(tmp_path / "absent"))


@pytest.mark.parametrize("has_nameless", [True, False])
def test_the_write_test_leaves_nothing_behind_when_it_is_killed(
    tmp_path: Path, has_nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def pread(handle: int, size: int, offset: int) -> bytes:
        seen.append(os.listdir(tmp_path))
        return b"cachepipe"

    monkeypatch.setattr(os, "pread", pread)
    if not has_nameless:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what file systems say that have none: not to be written
    cachedir.write_and_read_test(str(tmp_path))
    assert seen == [[]]
