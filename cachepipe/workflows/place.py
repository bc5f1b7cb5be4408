"""The folder of a restore: candidates best first, and the locks under which one is filled.

    the builder's root, or --dest
    the same parent, `<name>.<digest12>`
    our folder in $XDG_CACHE_HOME, $TMPDIR, /tmp, /dev/shm, `<name>.<digest12>`

Two locks: `<parent>/.<name>.lock` orders restores into one folder, the folder's lease tells whether services use it. A
folder that is in use, or that holds what cachepipe did not make, is never replaced: the next candidate is taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from cachepipe.adapters import cachedir
from cachepipe.adapters.lease import NAME as LEASE
from cachepipe.adapters.lease import Lease, lock_file
from cachepipe.domain import marker
from cachepipe.domain.variables import NOT_COMPILED_IN, can_compile_in
from cachepipe.errors import NoRoomError, UnsafePathError

_OURS = frozenset({"engine", "inductor", "triton", ".cachepipe", LEASE})
"""All that a compile cache folder holds; anything else beside them is someone's."""


class Place:
    """A folder that no other restore fills while this object is not released."""

    def __init__(self, folder: str, lock: int) -> None:
        self.folder = folder
        self._lock: int | None = lock
        self._lease: Lease | None = None

    def hold(self) -> None:
        """Makes sure that the folder may be replaced, and keeps it so.

        Raises:
            UnsafePathError: a service uses it, or it holds what cachepipe did not make.
        """
        if not cachedir.is_occupied(self.folder):
            return
        _check_ours(self.folder)
        self._lease = Lease.take(self.folder, is_shared=False)
        if self._lease is None:
            is_file = os.path.isfile(os.path.join(self.folder, LEASE))
            raise UnsafePathError(self.folder, "a running service uses it" if is_file else "its lease is not a file")

    def release(self) -> None:
        """Lets other restores in; a second call does nothing."""
        if self._lease is not None:
            self._lease.close()
        if self._lock is not None:
            os.close(self._lock)
        self._lease = self._lock = None


def _check_ours(folder: str) -> None:
    try:
        foreign = sorted(set(os.listdir(folder)) - _OURS)
    except OSError as error:
        raise UnsafePathError(folder, f"cannot be looked at ({error.strerror})") from error
    if foreign:
        raise UnsafePathError(folder, f"holds what cachepipe did not make: `{foreign[0]}`")


def candidates(final: str, own_name: str, has_scratch: bool, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the folders to try, best first.

    Args:
        final: the builder's root, or what `--dest` names.
        own_name: name of a folder of this content alone; it is never replaced while it is used.
        has_scratch: False: only beside `final` (an image build wants its folder or an error).
        environment: for $XDG_CACHE_HOME and $TMPDIR.
    """
    beside = os.path.join(os.path.dirname(final), own_name)
    scratch = [os.path.join(place, own_name) for place in cachedir.scratch_folders(environment)]
    # On a network file system locks are not to be trusted, so nothing is ever replaced there.
    first = [beside] if cachedir.is_on_network(os.path.dirname(final)) else [final, beside]
    return tuple(dict.fromkeys([*first, *scratch] if has_scratch else first[:1]))


def reserve(folder: str, need: cachedir.Need, deadline: float) -> Place:
    """Returns the folder under its lock, after checking that a tree can be put there.

    Raises:
        UnsafePathError: others could change it, it holds what cachepipe did not make, it is a mount point, read-only or noexec.
        NoRoomError: not enough bytes or inodes; both numbers are named.
        DeadlineError: another restore held the lock until the deadline.
    """
    parent = os.path.dirname(folder)
    if not folder.isprintable():
        raise UnsafePathError(ascii(folder), "a name that is not printable UTF-8, which no marker can hold")
    if not can_compile_in(folder):
        raise UnsafePathError(folder, NOT_COMPILED_IN)
    if not os.path.isdir(parent):
        cachedir.make_private(parent)
    cachedir.check_ancestors(folder)
    if os.path.ismount(folder):
        raise UnsafePathError(folder, "a mount point, which no rename can replace: mount its parent")
    if os.path.lexists(folder):
        if os.access(folder, os.R_OK) and not os.path.lexists(os.path.join(folder, marker.PATH)):
            _check_ours(folder)  # before its mode is changed: a folder of someone else's files stays as it is
        cachedir.check_private(folder)
    try:
        cachedir.check_usable(parent, need)
    except NoRoomError:
        if cachedir.is_on_network(parent):
            raise  # there a lock may not be seen by others
        lock = lock_file(_lock_path(folder), deadline)
        try:
            cachedir.sweep(folder, time.time(), stale_s=0.0)  # what killed restores left is no reason to stay cold
        finally:
            os.close(lock)
        cachedir.check_usable(parent, need)
    return Place(folder, lock_file(_lock_path(folder), deadline))


def _lock_path(folder: str) -> str:
    return os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.lock")


def refusal(problems: Sequence[UnsafePathError | NoRoomError]) -> UnsafePathError | NoRoomError:
    """Returns one error for all candidates: of the first one's kind, with everyone's reason."""
    if len(problems) == 1:
        return problems[0]
    text = "; ".join(str(problem) for problem in problems)
    return NoRoomError(text) if isinstance(problems[0], NoRoomError) else UnsafePathError("no usable folder", text)
