"""Private folders for executable caches: which one is safe, has room, and how a finished tree gets there.

Whoever can write where a service reads its cache runs code in that service. So a folder is used only if it is ours,
closed to others (0700), no link, below ancestors that only root or we can change. What cannot be made so is left
alone, and the next candidate is taken (`workflows/place.py`).

No name of the user and no home folder is ever looked up: an odd uid works.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from cachepipe.adapters.lease import Lease
from cachepipe.adapters.regular_file import read_regular
from cachepipe.domain.limits import MIB
from cachepipe.domain.variables import can_compile_in
from cachepipe.errors import DeadlineError, IntegrityError, NoRoomError, UnsafePathError

DEFAULT_CACHE_ROOT = "/var/cache/cachepipe"
STALE_S = 3600
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW
_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "afs", "fuse")
_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuseblk")
_MARGIN_BYTES = 16 * MIB
_MARGIN_FILES = 64
_MOST_LINKS = 40


class Need(NamedTuple):
    """What a restore is going to write."""

    bytes: int
    files: int


def check_private(folder: str, *, closes: bool = True) -> None:
    """Returns if only we (and root) can change what `folder` names; a folder of ours that others can read is closed.

    Args:
        folder: absolute.
        closes: False: nothing is changed.

    Raises:
        UnsafePathError: absent, a link, another owner, writable by others, or an ancestor that others can change.
    """
    check_ancestors(folder)
    try:
        handle = os.open(folder, _FOLDER)
    except PermissionError as error:
        owner = os.lstat(folder).st_uid
        raise UnsafePathError(folder, f"owned by uid {owner}, closed to us ({os.geteuid()})") from error
    except OSError as error:
        raise UnsafePathError(folder, "not a folder of its own (a link or absent)") from error
    try:
        facts = os.fstat(handle)
        if facts.st_uid != os.geteuid():
            raise UnsafePathError(folder, f"owned by uid {facts.st_uid}, we are {os.geteuid()}")
        if facts.st_mode & 0o022:
            raise UnsafePathError(folder, f"writable by others (mode {stat.S_IMODE(facts.st_mode):04o})")
        if closes and facts.st_mode & 0o777 != 0o700:
            os.fchmod(handle, 0o700)
    except OSError as error:
        raise UnsafePathError(folder, f"cannot be closed to others ({error.strerror})") from error
    finally:
        os.close(handle)


def check_ancestors(folder: str) -> None:
    """Returns if no one but root and us can replace a folder above `folder`.

    Raises:
        UnsafePathError: an existing ancestor has another owner, or is writable by others and not sticky.
    """
    parent = os.path.dirname(os.path.abspath(folder))
    for ancestor in dict.fromkeys(_passed(parent)):
        try:
            facts = os.lstat(ancestor)
        except FileNotFoundError:
            return  # and nothing lies below
        except OSError as error:
            raise UnsafePathError(ancestor, f"cannot be looked at ({error.strerror})") from error
        if facts.st_uid not in (0, os.geteuid()):
            raise UnsafePathError(ancestor, f"owned by uid {facts.st_uid}, neither root nor us")
        # In a sticky folder only root, its owner (root or we, see above) and a name's own owner can rename.
        is_shared_safely = facts.st_mode & stat.S_ISVTX
        if facts.st_mode & 0o022 and not is_shared_safely and not stat.S_ISLNK(facts.st_mode):
            raise UnsafePathError(ancestor, f"writable by others (mode {stat.S_IMODE(facts.st_mode):04o})")


def _passed(path: str) -> Iterator[str]:
    """Yields all that is looked up on the way to `path`: each link, and what is passed behind it."""
    place, rest, links = "/", path.split("/"), 0
    yield place
    while rest:
        part = rest.pop(0)
        if part == "..":
            place = os.path.dirname(place)
            continue
        if part in ("", "."):
            continue
        step = os.path.join(place, part)
        yield step
        try:
            target = os.readlink(step)
        except OSError:
            place = step
            continue
        links += 1
        if links > _MOST_LINKS:
            return  # as the kernel, which will not come to an end of it either
        place = "/" if target.startswith("/") else place
        rest = target.split("/") + rest


def make_private(folder: str) -> None:
    """Makes `folder` (and missing ancestors) 0700, or checks the one that is there.

    Raises:
        UnsafePathError: see `check_private`; or it cannot be created.
    """
    check_ancestors(folder)
    missing = []
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        for path in reversed(missing):
            with suppress(FileExistsError):  # another restore was faster; it is checked below like any other
                mkdir_private(path)
    except OSError as error:
        raise UnsafePathError(folder, f"cannot be created ({error.strerror})") from error
    check_private(folder)


def mkdir_private(path: str) -> None:
    """Makes one folder for us alone; raises OSError. It takes no descriptor, of which there may be none left."""
    os.mkdir(path, 0o700)
    os.chmod(path, 0o700)  # the umask may have taken our own rights


def read_own(path: str, limit_bytes: int) -> bytes:
    """Returns the bytes of a regular file; raises OSError for a link, a pipe, a folder or more than `limit_bytes` (+ 1 of one that grows)."""
    return read_regular(path, limit_bytes, follows_links=False)


def check_usable(folder: str, need: Need) -> None:
    """Returns if the existing `folder` can be written, can hold executable files and has room.

    Raises:
        UnsafePathError: read-only, or mounted noexec.
        NoRoomError: fewer free bytes or inodes than needed with a margin of a tenth and 16 MiB or 64 inodes; both numbers are named.
    """
    facts = os.statvfs(folder)
    if facts.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise UnsafePathError(folder, "not writable")
    check_executable(folder, facts)
    check_room(folder, need, facts)


def check_room(folder: str, need: Need, facts: os.statvfs_result) -> None:
    """Returns if the file system of `folder` has room; every file takes up to one block more than its bytes.

    Raises:
        NoRoomError: see `check_usable`.
    """
    wanted = need.bytes + need.bytes // 10 + _MARGIN_BYTES + need.files * facts.f_frsize
    free = facts.f_bavail * facts.f_frsize
    if free < wanted:
        raise NoRoomError(f"{folder}: not enough room: wanted {wanted} bytes, free {free}, missing {wanted - free}")
    inodes = need.files + need.files // 10 + _MARGIN_FILES
    if facts.f_files and facts.f_favail < inodes:  # some file systems count no inodes: f_files is 0
        missing = inodes - facts.f_favail
        raise NoRoomError(f"{folder}: not enough inodes: wanted {inodes}, free {facts.f_favail}, missing {missing}")


def check_executable(folder: str, facts: os.statvfs_result) -> None:
    """Returns if native objects can be loaded from a folder, of whose file system these are the facts.

    Raises:
        UnsafePathError: it is mounted noexec.
    """
    if facts.f_flag & os.ST_NOEXEC:
        raise UnsafePathError(folder, "mounted noexec: native objects could not be loaded")


def scratch_folders(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns our folder in each place that may serve when the final folder cannot, best first; torch can compile in all."""
    own = f"cachepipe-{os.geteuid()}"
    found = []
    if environment.get("XDG_CACHE_HOME", "").startswith("/"):
        found.append(os.path.join(environment["XDG_CACHE_HOME"], "cachepipe"))
    if environment.get("TMPDIR", "").startswith("/"):
        found.append(os.path.join(environment["TMPDIR"], own))
    return tuple(dict.fromkeys([*filter(can_compile_in, found), f"/tmp/{own}", f"/dev/shm/{own}"]))


def is_on_network(folder: str) -> bool:
    """Tells whether a folder lies on a network file system, where locks and renames do not keep their promises."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split() for line in file]
    except OSError:
        return False
    real = os.path.realpath(folder) + "/"
    best, kind = "", ""
    for fields in lines:
        mount = fields[4].replace("\\040", " ")
        if real.startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, fields[fields.index("-") + 1]
    return kind.startswith(_NETWORK) and kind not in _LOCAL_FUSE


def temporary_sibling(final: str) -> str:
    """Makes `<final>.tmp.<pid>.<random>`, private and empty; that it can be made is the write test.

    Raises:
        UnsafePathError, NoRoomError: it cannot be made.
    """
    path = f"{final}.tmp.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        mkdir_private(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomError(f"{path}: {error.strerror}") from error
        raise UnsafePathError(path, f"cannot be created ({error.strerror})") from error
    return path


def swap_in(temporary: str, final: str, deadline: float) -> None:
    """Puts a finished tree in its place by one rename; an older tree that no service holds is renamed aside.

    Args:
        temporary: complete, marker included.
        final: absent, empty, or a tree whose lease the caller holds exclusively.
        deadline: in seconds of `time.monotonic`; nothing appears after it.

    Raises:
        DeadlineError: it is over.
        UnsafePathError: the renames are refused.
    """
    if time.monotonic() > deadline:
        raise DeadlineError("time ran out before the tree was complete")
    try:
        try:
            os.rename(temporary, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            os.rename(final, f"{final}.old.{os.urandom(4).hex()}")
            os.rename(temporary, final)
    except OSError as error:
        raise UnsafePathError(final, f"cannot be replaced ({error.strerror})") from error


def is_occupied(folder: str) -> bool:
    """Tells whether something stands at `folder` that an atomic rename would not replace."""
    try:
        with os.scandir(folder) as found:
            return next(found, None) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True


def write_and_read_test(folder: str) -> None:
    """Returns if a file can be made and read back in `folder`, as torch will do on every start.

    Raises:
        UnsafePathError: it cannot.
        IntegrityError: other bytes come back.
    """
    try:
        handle = _nameless_file(folder)
        try:
            os.write(handle, b"cachepipe")
            found = os.pread(handle, 16, 0)
        finally:
            os.close(handle)
    except OSError as error:
        raise UnsafePathError(folder, f"a file cannot be written and read ({error.strerror})") from error
    if found != b"cachepipe":
        raise IntegrityError(f"a file in {folder}", "read back", wanted=b"cachepipe", found=found)


def _nameless_file(folder: str) -> int:
    """Returns a new file that no kill can leave behind; where the file system has no such files, one that loses its name at once."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:
        pass  # not supported, under several numbers; or not writable, which the next call says
    path = os.path.join(folder, f".probe.{os.urandom(4).hex()}")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # exclusive: no link is followed either
    os.unlink(path)
    return handle


def sweep(final: str, now: float, stale_s: float = STALE_S) -> None:
    """Removes temporaries and replaced trees of `final` that are older than an hour; never raises.

    Args:
        final: the folder; only `<final>.tmp.*` and `<final>.old.*` are looked at.
        now: seconds since the epoch.
        stale_s: less is right only for who holds the lock of `final`, under which every temporary is a dead writer's.
    """
    import shutil  # costs milliseconds that a start without a sweep does not pay

    try:
        with os.scandir(os.path.dirname(final)) as found:
            names = [item.path for item in found if item.path.startswith((f"{final}.tmp.", f"{final}.old."))]
        for path in names:
            if now - os.lstat(path).st_mtime > stale_s and Lease.is_free(path):
                shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return
