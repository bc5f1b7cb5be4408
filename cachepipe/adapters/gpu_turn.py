"""Whose turn it is on a GPU: builds of one user on one machine share it, except while one of them tunes.

Two locks per GPU. Who waits for the GPU holds the gate, so that later ones queue up behind: a tuning build is not kept waiting
for ever by others that take turns. Both are flocks, free when their holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator

from cachepipe.adapters.folders import lock_file
from cachepipe.adapters.lease import open_own
from cachepipe.errors import NoRoomError, UnsafePathError

_ELSEWHERE = "name a folder of your own by TMPDIR, the same one for all builds of this machine"
_HINT = f"builds take turns on the GPU by this file: remove what is there, or {_ELSEWHERE}"


@contextlib.contextmanager
def gpu_turn(uuid: str, is_alone: bool, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds a GPU while the body lasts.

    Args:
        uuid: of the GPU, `GPU-…` or `MIG-…`.
        is_alone: nobody else may use it meanwhile; else others that share it may.
        on_wait: called before waiting for others.

    Raises:
        UnsafePathError: at the lock's place is something that is no file of ours, or no file can be made or locked there.
        NoRoomError: the disk is full.
    """
    with _opened(f"{uuid}.gate") as gate, _opened(uuid) as turn:
        try:
            lock_file(gate, on_wait)
            lock_file(turn, on_wait, is_alone=is_alone)
        except OSError as error:  # a network's file system without locks
            problem = f"cannot be locked ({error.strerror})"
            raise UnsafePathError(
                tempfile.gettempdir(), problem, hint=f"builds take turns there: {_ELSEWHERE}"
            ) from error
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int]:
    path = "TMPDIR"
    try:
        path = os.path.join(tempfile.gettempdir(), f"cachepipe-{os.getuid()}-{name}.lock")
        handle = open_own(path, hint=_HINT)
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomError(f"{path}: {problem}", hint=f"free space there, or {_ELSEWHERE}") from error
        raise UnsafePathError(path, problem, hint=_HINT) from error
    try:
        yield handle
    finally:
        os.close(handle)
