"""The lease of a restored folder: who uses it, kept by the kernel and gone with the process.

A service holds a *shared* flock on `<folder>/.lease` through a descriptor that it inherits over exec; whoever wants to
replace the folder needs the *exclusive* one. A killed holder's lock is free at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from cachepipe.errors import DeadlineError, UnsafePathError

NAME = ".lease"
_POLL_S = 0.02


class Lease:
    """A held flock; closing the descriptor gives it back."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @classmethod
    def take(cls, folder: str, *, is_shared: bool) -> Lease | None:
        """Returns the lease of the folder that stands at this path now, or None when another process forbids it."""
        path = os.path.join(folder, NAME)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        if _is_locked(handle, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) and _is_same(handle, path):
            return cls(handle)
        os.close(handle)
        return None

    @classmethod
    def is_free(cls, folder: str) -> bool:
        """Tells whether no service holds this folder; one without a lease file is free."""
        if not os.path.lexists(os.path.join(folder, NAME)):
            return True
        lease = cls.take(folder, is_shared=False)
        if lease is None:
            return False
        lease.close()
        return True

    def share(self) -> None:
        """Turns an exclusive lease into a shared one."""
        fcntl.flock(self.handle, fcntl.LOCK_SH)

    def make_inheritable(self) -> None:
        """Lets the command that this process becomes hold the lease until it ends."""
        os.set_inheritable(self.handle, True)

    def close(self) -> None:
        os.close(self.handle)


def _is_locked(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _is_same(handle: int, path: str) -> bool:
    """Tells whether the locked file still stands at its path: the folder may have been renamed aside meanwhile."""
    try:
        here, there = os.fstat(handle), os.lstat(path)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def open_own(path: str, *, hint: str | None = None) -> int:
    """Returns a descriptor of a file of ours whose lock others know by its name; created 0600 if absent, never through a link.

    Raises:
        OSError: it cannot be opened.
        UnsafePathError: it is not ours: its owner could hold the lock for ever.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    facts = os.fstat(handle)
    is_ours = facts.st_uid == os.geteuid()
    if is_ours and stat.S_ISREG(facts.st_mode):
        return handle
    os.close(handle)
    why = "is not a regular file" if is_ours else f"belongs to user {facts.st_uid}, we are {os.geteuid()}"
    raise UnsafePathError(path, f"not a file of ours: it {why}", hint=hint)


def lock_file(path: str, deadline: float) -> int:
    """Returns a descriptor that holds the exclusive lock of a file; orders restores into one folder.

    Args:
        path: see `open_own`.
        deadline: in seconds of `time.monotonic`.

    Raises:
        DeadlineError: another process held it until then.
        UnsafePathError: the file cannot be opened, or is not ours.
    """
    try:
        handle = open_own(path)
    except OSError as error:
        raise UnsafePathError(path, f"cannot be opened ({error.strerror})") from error
    while not _is_locked(handle, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            os.close(handle)
            raise DeadlineError(f"another restore held {path} until the deadline")
        time.sleep(_POLL_S)
    return handle
