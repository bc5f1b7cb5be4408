"""What a build asks of the folders it works in: alone in them, able to write, with room."""

from __future__ import annotations

import errno
import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cachepipe.domain.limits import MIB
from cachepipe.errors import NoRoomError, UnsafePathError

MIN_FREE_BYTES = 64 * MIB
"""What one entry of one shape bucket leaves behind when it was tuned (design, F3)."""


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Says which folder is full or not writable; other errors of the system pass."""
    try:
        yield
    except OSError as error:
        path, problem = error.filename or folder, (error.strerror or str(error)).lower()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free space there, or name folders with room by `--work` and `--cache-root`"
            raise NoRoomError(f"{path}: {problem}", hint=hint) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UnsafePathError(path, problem, hint="name a folder that you can write by `--work`") from error
        raise


def lock_file(fd: int, on_wait: Callable[[], None], *, is_alone: bool = True) -> None:
    """Locks an open file for this process alone, or for all that share it; `on_wait` is called before waiting for another one."""
    how = fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(fd, how)


def require_room(folder: Path) -> None:
    """Refuses early: torch passes over what it cannot write, and only the missing entries would show it."""
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        where = f"{folder}: {free} bytes are free, a build wants at least {MIN_FREE_BYTES}"
        raise NoRoomError(where, hint="free space there, or name folders with room by `--work` and `--cache-root`")
