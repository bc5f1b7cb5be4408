"""The folder of a restore: candidates best first, and the locks under which one is filled.

    the builder's root, or --dest
    the same parent, `<name>.<digest12>`
    our folder in $XDG_CACHE_HOME, $TMPDIR, /tmp, /dev/shm, `<name>.<digest12>`

Two locks: `<parent>/.<name>.lock` orders restores into one folder, the folder's lease tells whether services use it. A
folder that is in use, or that holds what cachepipe did not make, is never replaced: the next candidate is taken.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from cachepipe.adapters import cachedir
from cachepipe.adapters.lease import NAME as LEASE
from cachepipe.adapters.lease import Lease, lock_file
from cachepipe.errors import NoRoomError, UnsafePathError

_OURS = frozenset({"inductor", "triton", ".cachepipe", LEASE})
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
        try:
            foreign = sorted(set(os.listdir(self.folder)) - _OURS)
        except OSError as error:
            raise UnsafePathError(self.folder, "is no folder of ours") from error
        if foreign:
            raise UnsafePathError(self.folder, f"holds what cachepipe did not make: `{foreign[0]}`")
        self._lease = Lease.take(self.folder, is_shared=False)
        if self._lease is None:
            raise UnsafePathError(self.folder, "a running service uses it")

    def release(self) -> None:
        """Lets other restores in; a second call does nothing."""
        if self._lease is not None:
            self._lease.close()
        if self._lock is not None:
            os.close(self._lock)
        self._lease = self._lock = None


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
        UnsafePathError: others could change it, it is a mount point, read-only or noexec.
        NoRoomError: not enough bytes or inodes; both numbers are named.
        DeadlineError: another restore held the lock until the deadline.
    """
    parent = os.path.dirname(folder)
    if not os.path.isdir(parent):
        cachedir.make_private(parent)
    cachedir.check_ancestors(folder)
    if os.path.ismount(folder):
        raise UnsafePathError(folder, "a mount point, which no rename can replace: mount its parent")
    if os.path.lexists(folder):
        cachedir.check_private(folder)
    cachedir.check_usable(parent, need)
    return Place(folder, lock_file(os.path.join(parent, f".{os.path.basename(folder)}.lock"), deadline))


def refusal(problems: Sequence[UnsafePathError | NoRoomError]) -> UnsafePathError | NoRoomError:
    """Returns one error for all candidates: of the first one's kind, with everyone's reason."""
    if len(problems) == 1:
        return problems[0]
    text = "; ".join(str(problem) for problem in problems)
    return NoRoomError(text) if isinstance(problems[0], NoRoomError) else UnsafePathError("no usable folder", text)
