"""Attempts: which starts with a restored cache never became ready. Standard library only.

    <state>/attempts/<statement digest>/<start id>.<pid>     {"pid":4711,"time":1796000000}, flock held for the service's life

`attach` begins an attempt when the first compile begins in a process of the service, and finishes it at `ready()`, after
every covered graph was called, or at an orderly exit. A mark whose lock is free and that is still there is a service
that crashed. Only marks and folders of our own count: where others can write, they could quarantine us, or have us write
through a link. Two of them within 15 minutes: restore gives the next start an empty folder once, and clears them.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager

WINDOW_S = 900.0
MAX_UNFINISHED = 2
_MARK_BYTES = 4096


class Attempt:
    """One start; holds its mark until `finish`. Without a mark (state cannot be written) it does nothing."""

    def __init__(self, path: str, handle: int | None) -> None:
        self._path, self._handle = path, handle

    def finish(self) -> None:
        """Removes the mark: this start is not counted. A second call does nothing."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        try:
            os.unlink(self._path)
        except OSError:
            pass
        os.close(handle)


def begin(state_dir: str, digest: str, start_id: str) -> Attempt:
    """Marks a start with an artifact; never raises. Processes of one start share one mark, which the first holds.

    Args:
        state_dir: the folder of CACHEPIPE_STATE_DIR.
        digest: statement digest of the restored artifact.
        start_id: CACHEPIPE_START_ID; what follows a dot in it tells the processes of one start apart, which count once.
    """
    name = os.path.basename(start_id) or "unnamed"
    path = os.path.join(state_dir, *_names(digest), name)
    try:
        os.makedirs(state_dir, mode=0o700, exist_ok=True)
        with _folder(state_dir, digest, is_made=True) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError:
        return Attempt(path, None)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "time": int(time.time())}).encode(), 0)
    except OSError:
        os.close(handle)
        return Attempt(path, None)
    return Attempt(path, handle)


def unfinished(state_dir: str, digest: str, now: float, window_s: float = WINDOW_S) -> int:
    """Returns how many starts with this artifact ended without finishing, within the last `window_s` seconds.

    Args:
        state_dir: as in `begin`; a missing folder counts 0.
        digest: statement digest.
        now: seconds since the epoch.
        window_s: older marks are not counted.
    """
    try:
        with _folder(state_dir, digest) as folder:
            times = [(name.partition(".")[0], _time_of_dead(folder, name)) for name in os.listdir(folder)]
    except OSError:
        return 0
    return len({start for start, began in times if began is not None and now - window_s <= began <= now + window_s})


def clear(state_dir: str, digest: str) -> None:
    """Removes the marks of ended starts: the next start tries the artifact again. Never raises."""
    try:
        with _folder(state_dir, digest) as folder:
            for name in os.listdir(folder):
                if _time_of_dead(folder, name) is not None:
                    os.unlink(name, dir_fd=folder)
    except OSError:
        return


def _names(digest: str) -> tuple[str, str]:
    return "attempts", os.path.basename(digest) or "unnamed"


@contextmanager
def _folder(state_dir: str, digest: str, is_made: bool = False) -> Iterator[int]:
    """Gives a handle of the marks' folder; raises OSError if it is absent, behind a link, or another user's."""
    handle = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in _names(digest):
            if is_made:
                try:
                    os.mkdir(name, 0o700, dir_fd=handle)
                except FileExistsError:
                    pass
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            os.close(handle)
            handle = below
            if os.fstat(handle).st_uid != os.geteuid():
                raise PermissionError(f"{state_dir}: `{name}` is another user's")
        yield handle
    finally:
        os.close(handle)


def _time_of_dead(folder: int, name: str) -> float | None:
    """Returns when an ended start began; None while its process lives. An unreadable mark counts by its mtime."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return None
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_nlink == 0:
            return None  # finished between our open and our lock
        try:
            return float(json.loads(os.read(handle, _MARK_BYTES))["time"])
        except (ValueError, TypeError, KeyError):
            return os.fstat(handle).st_mtime
    except OSError:
        return None
    finally:
        os.close(handle)
