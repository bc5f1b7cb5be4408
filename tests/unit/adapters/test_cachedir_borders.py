"""Private folders at the borders: the last mode, link, block, second and place that count, each with its neighbour that does not."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachepipe.adapters import cachedir
from cachepipe.adapters.cachedir import Need
from cachepipe.domain.limits import MIB
from cachepipe.errors import DeadlineError, IntegrityError, NoRoomError, UnsafePathError

OTHER = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that another user can reach, unlike pytest's own; all in it is removed as root."""
    path = Path(tempfile.mkdtemp(prefix="cachepipe-borders-"))
    path.chmod(0o755)
    yield path
    os.seteuid(os.getuid())
    shutil.rmtree(path)


def own(path: Path, mode: int = 0o700) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


# --- whose folder, which mode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o701, 0o704, 0o710, 0o740, 0o755, 0o500, 0o300, 0o600, 0o000])
def test_a_folder_with_any_bit_too_many_or_too_few_gets_the_right_mode(tmp_path: Path, mode: int) -> None:
    path = own(tmp_path / "a", mode)
    try:
        cachedir.check_private(str(path), closes=False)
        assert stat.S_IMODE(path.stat().st_mode) == mode, "nothing is to be changed"
        cachedir.check_private(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    except UnsafePathError:
        assert os.geteuid() != 0 and not mode & 0o400, "who is not root cannot open it"


def test_a_folder_with_the_right_mode_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own(tmp_path / "a")
    touched: list[int] = []
    monkeypatch.setattr(os, "fchmod", lambda handle, mode: touched.append(mode))
    cachedir.check_private(str(path))
    assert touched == []


@only_root
def test_another_user_is_at_home_in_a_folder_of_his_own_below_roots(place: Path) -> None:
    home = own(place / "home")
    os.chown(home, OTHER, OTHER)
    os.seteuid(OTHER)
    cachedir.check_private(str(home))
    cachedir.make_private(str(home / "a/b"))
    cachedir.check_usable(str(home), Need(0, 0))


@only_root
def test_roots_folder_is_not_another_users(place: Path) -> None:
    own(place / "home", 0o755)
    os.seteuid(OTHER)
    with pytest.raises(UnsafePathError, match=f"owned by uid 0, we are {OTHER}"):
        cachedir.check_private(str(place / "home"))


@only_root
def test_the_folder_of_the_next_user_above_root_is_no_safe_ancestor(place: Path) -> None:
    inner = own(own(place / "theirs") / "a")
    os.chown(place / "theirs", 1, 1)
    with pytest.raises(UnsafePathError, match="owned by uid 1, neither root nor us"):
        cachedir.check_private(str(inner))


@only_root
@pytest.mark.parametrize("mode", [0o500, 0o600])
def test_a_folder_that_we_can_only_write_or_only_enter_is_not_usable(place: Path, mode: int) -> None:
    home = own(place / "home", mode)
    os.chown(home, OTHER, OTHER)
    os.seteuid(OTHER)  # the real user is still root: the effective one counts, as for open()
    with pytest.raises(UnsafePathError, match="not writable"):
        cachedir.check_usable(str(home), Need(0, 0))


# --- the way to a folder -------------------------------------------------------------------------------------------------


def test_a_way_that_goes_up_before_it_goes_down_is_looked_at_behind_the_step_up(tmp_path: Path) -> None:
    own(tmp_path / "in")
    own(own(tmp_path / "open", 0o777) / "a")
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "way").symlink_to("in/../open")
    with pytest.raises(UnsafePathError, match="writable by others") as caught:
        cachedir.check_private(str(tmp_path / "way/a"))
    assert caught.value.path == str(tmp_path / "open")


def test_a_dot_in_a_links_target_is_no_step(tmp_path: Path) -> None:
    own(own(own(tmp_path / "in") / "open") / "a")
    (tmp_path / "in/open").chmod(0o777)
    (tmp_path / "way").symlink_to("in/./open")
    with pytest.raises(UnsafePathError, match="open: writable by others"):
        cachedir.check_private(str(tmp_path / "way/a"))


@pytest.mark.parametrize(("links", "is_seen"), [(40, True), (41, False)])
def test_as_many_links_as_the_kernel_follows_are_followed(tmp_path: Path, links: int, is_seen: bool) -> None:
    own(own(tmp_path / "open") / "a")
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "1").symlink_to("open")
    for number in range(2, links + 1):
        (tmp_path / str(number)).symlink_to(str(number - 1))
    folder = tmp_path / str(links) / "a"
    assert os.path.isdir(folder) is is_seen
    with pytest.raises(UnsafePathError, match="writable by others" if is_seen else "a link or absent"):
        cachedir.check_private(str(folder))


def test_an_ancestor_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsafePathError, match=r"file/a: cannot be looked at \(Not a directory\)"):
        cachedir.make_private(str(tmp_path / "file/a/b"))


def test_an_ancestor_that_is_absent_is_no_fault_of_the_way(tmp_path: Path) -> None:
    cachedir.check_ancestors(str(tmp_path / "absent/a/b"))


# --- folders that are made -----------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsafePathError, match=r"cannot be created \(File name too long\)"):
        cachedir.make_private(str(tmp_path / ("x" * 256)))


def test_a_folder_that_another_restore_makes_meanwhile_is_taken_and_the_rest_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def second(path: str, mode: int) -> None:
        if path.endswith("/a"):
            mkdir(path, mode)
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", second)
    cachedir.make_private(str(tmp_path / "a/b"))
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700


@pytest.mark.parametrize("make", [cachedir.make_private, cachedir.temporary_sibling])
def test_a_new_folder_is_at_no_time_open_to_others(
    tmp_path: Path, make: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    chmod, seen = os.chmod, []

    def looked_at(path: str, mode: int) -> None:
        seen.append(stat.S_IMODE(os.stat(path).st_mode))
        chmod(path, mode)
        seen.append(stat.S_IMODE(os.stat(path).st_mode))

    monkeypatch.setattr(os, "chmod", looked_at)
    mask = os.umask(0)
    try:
        make(str(tmp_path / "a"))
    finally:
        os.umask(mask)
    assert seen == [0o700, 0o700]


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, NoRoomError),
        (errno.EDQUOT, NoRoomError),
        (errno.EROFS, UnsafePathError),
        (errno.EMLINK, UnsafePathError),
    ],
)
def test_a_temporary_folder_that_cannot_be_made_says_whether_room_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    def refuse(path: str, mode: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(error, match=os.strerror(number)):
        cachedir.temporary_sibling(str(tmp_path / "demo"))


# --- room and mounts -----------------------------------------------------------------------------------------------------


def mounted(blocks: int = 10**6, inodes: int = 10**6, all_inodes: int = 10**6, flags: int = 0) -> os.statvfs_result:
    """Returns a file system of 1 MiB reads and 4 KiB blocks; root has more than is `avail`able to others."""
    return os.statvfs_result((MIB, 4096, 10**9, blocks + 7, blocks, all_inodes, inodes + 7, inodes, flags, 255))


NEED = Need(40_960_000, 100)
BLOCKS = 10_000 + 1_000 + 16 * MIB // 4096 + 100
INODES = 100 + 10 + 64


def test_case_c12_a_tenth_more_than_needed_16_mib_a_block_per_file_and_64_inodes_is_room_enough() -> None:
    cachedir.check_room("/cache", NEED, mounted(BLOCKS, INODES))
    wanted = BLOCKS * 4096
    for missing in (1, BLOCKS - 3, BLOCKS):
        free = (BLOCKS - missing) * 4096
        words = f"/cache: not enough room: wanted {wanted} bytes, free {free}, missing {missing * 4096}$"
        with pytest.raises(NoRoomError, match=words):
            cachedir.check_room("/cache", NEED, mounted(BLOCKS - missing, INODES))
    for missing in (1, INODES - 3, INODES):
        words = f"/cache: not enough inodes: wanted {INODES}, free {INODES - missing}, missing {missing}$"
        with pytest.raises(NoRoomError, match=words):
            cachedir.check_room("/cache", NEED, mounted(BLOCKS, INODES - missing))


def test_a_file_system_that_counts_no_inodes_has_enough() -> None:
    cachedir.check_room("/cache", NEED, mounted(inodes=0, all_inodes=0))  # as btrfs
    with pytest.raises(NoRoomError, match="inodes"):
        cachedir.check_room("/cache", NEED, mounted(inodes=0, all_inodes=1))


def test_noexec_alone_of_a_mounts_flags_keeps_native_objects_from_being_loaded() -> None:
    every = os.ST_NOSUID | os.ST_NODEV | os.ST_NOATIME | os.ST_RELATIME | os.ST_SYNCHRONOUS | os.ST_RDONLY
    cachedir.check_executable("/cache", mounted(flags=every))
    with pytest.raises(UnsafePathError, match="/cache: mounted noexec"):
        cachedir.check_executable("/cache", mounted(flags=every | os.ST_NOEXEC))
    with pytest.raises(UnsafePathError, match="/cache: mounted noexec"):
        cachedir.check_executable("/cache", mounted(flags=os.ST_NOEXEC))


@pytest.mark.parametrize(
    ("flags", "words"),
    [(os.ST_RDONLY, "not writable"), (os.ST_RDONLY | os.ST_NOSUID, "not writable"), (os.ST_NOEXEC, "noexec")],
)
def test_a_folder_on_a_mount_of_these_flags_is_not_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, words: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: mounted(flags=flags))
    with pytest.raises(UnsafePathError, match=words):
        cachedir.check_usable(str(tmp_path), Need(0, 0))
    monkeypatch.setattr(os, "statvfs", lambda folder: mounted(flags=os.ST_NOSUID | os.ST_NOATIME))
    cachedir.check_usable(str(tmp_path), Need(0, 0))


@pytest.mark.parametrize(
    ("lines", "is_network"),
    [
        (["- nfs4 server:/x rw", "- ext4 /dev/x rw"], False),
        (["- ext4 /dev/x rw", "- nfs4 server:/x rw"], True),
        (["master:1 shared:2 - nfs4 server:/x rw"], True),
        ([], False),
    ],
    ids=["local over network", "network over local", "two optional fields", "no such file"],
)
def test_of_several_mounts_the_last_on_the_longest_way_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], is_network: bool
) -> None:
    table = tmp_path / "mountinfo"
    if lines:
        here = [f"30 20 0:5 / {tmp_path} rw {line}" for line in lines]
        others = ["1 0 8:1 / / rw - nfs4 root:/ rw", f"9 1 0:9 / {tmp_path.parent} rw - cifs //x rw"]
        table.write_text("\n".join([*here, *others, f"40 1 0:5 / {tmp_path}2 rw - nfs4 server:/y rw"]) + "\n")
    real = open
    monkeypatch.setattr(
        "builtins.open", lambda path, *a, **k: real(table if path == "/proc/self/mountinfo" else path, *a, **k)
    )
    assert cachedir.is_on_network(str(tmp_path / "cache")) is is_network


# --- what stands there, what is swept ------------------------------------------------------------------------------------


def test_a_place_is_occupied_by_all_but_nothing_and_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (own(tmp_path / "full") / "f").touch()
    own(tmp_path / "empty")
    found = {name: cachedir.is_occupied(str(tmp_path / name)) for name in ("absent", "empty", "file", "full")}
    assert found == {"absent": False, "empty": False, "file": True, "full": True}


def test_a_tree_may_appear_until_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cachedir.time, "monotonic", lambda: 100.0)
    own(tmp_path / "new")
    with pytest.raises(DeadlineError):
        cachedir.swap_in(str(tmp_path / "new"), str(tmp_path / "final"), 99.5)
    cachedir.swap_in(str(tmp_path / "new"), str(tmp_path / "final"), 100.0)
    assert os.listdir(tmp_path) == ["final"]


def test_an_hour_old_is_not_yet_stale_and_a_second_more_is(tmp_path: Path) -> None:
    for number in (1, 2):
        own(tmp_path / f"demo.tmp.{number}")
        os.utime(tmp_path / f"demo.tmp.{number}", (10_000, 10_000 - number))
    cachedir.sweep(str(tmp_path / "demo"), 10_000 - 2 + 3600)
    assert sorted(os.listdir(tmp_path)) == ["demo.tmp.1", "demo.tmp.2"]
    cachedir.sweep(str(tmp_path / "demo"), 10_000 - 2 + 3601)
    assert os.listdir(tmp_path) == ["demo.tmp.1"]
    cachedir.sweep(str(tmp_path / "demo"), 10_000, stale_s=0)
    assert os.listdir(tmp_path) == []


@only_root
def test_a_tree_that_cannot_be_removed_keeps_no_other_from_being_swept(place: Path) -> None:
    os.chown(place, OTHER, OTHER)
    for name in ("demo.old.1", "demo.old.2", "demo.old.3"):
        own(place / name)
        os.chown(place / name, OTHER, OTHER)
    (own(place / "demo.old.2/roots") / "f").touch()
    for name in ("demo.old.1", "demo.old.2", "demo.old.3"):
        os.utime(place / name, (0, 0))
    os.seteuid(OTHER)
    cachedir.sweep(str(place / "demo"), 10_000)
    assert os.listdir(place) == ["demo.old.2"]


def test_where_nothing_can_be_swept_nothing_is_raised(tmp_path: Path) -> None:
    cachedir.sweep(str(tmp_path / "absent/demo"), 10_000)


# --- files -----------------------------------------------------------------------------------------------------------------


def test_an_own_file_is_read_and_a_link_to_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("f")
    assert cachedir.read_own(str(tmp_path / "f"), 5) == b"bytes"
    for name, limit in (("link", 5), ("f", 4)):
        with pytest.raises(OSError):
            cachedir.read_own(str(tmp_path / name), limit)


@pytest.mark.parametrize("found", [b"cachepip", b"cachepipf", b"cachepipd", b""])
def test_a_place_that_gives_other_bytes_back_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bytes
) -> None:
    monkeypatch.setattr(os, "pread", lambda handle, size, offset: found)
    with pytest.raises(IntegrityError):
        cachedir.write_and_read_test(str(tmp_path))


@pytest.mark.parametrize("has_nameless", [True, False])
def test_the_probe_is_read_by_nobody_else_and_back_from_its_first_byte(
    tmp_path: Path, has_nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread, modes = os.pread, []

    def looked_at(handle: int, size: int, offset: int) -> bytes:
        modes.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return pread(handle, size, offset)

    monkeypatch.setattr(os, "pread", looked_at)
    if not has_nameless:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    mask = os.umask(0)
    try:
        cachedir.write_and_read_test(str(tmp_path))
    finally:
        os.umask(mask)
    assert modes == [0o600]


def test_the_probe_has_no_name_where_there_are_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        pytest.skip("this file system has none")
    named: list[int] = []
    monkeypatch.setattr(os, "urandom", lambda size: named.append(size) or bytes(size))
    cachedir.write_and_read_test(str(tmp_path))
    assert named == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_the_probe_is_never_what_already_stands_at_its_name(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what file systems say that have none
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / "target").write_bytes(b"theirs")
    for length in range(9):
        name = tmp_path / f".probe.{bytes(length).hex()}"
        name.symlink_to("target") if kind == "link" else name.write_bytes(b"theirs")
    with pytest.raises(UnsafePathError, match="File exists"):
        cachedir.write_and_read_test(str(tmp_path))
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"theirs"}
