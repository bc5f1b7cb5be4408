"""Attempts: which starts with a restored cache never became ready. Standard library only.

    <state>/attempts/<statement digest>/<start id>     {"pid":4711,"time":1796000000}, flock held for the service's life

`attach` begins an attempt when torch's compiler is first imported in the service, and finishes it at `ready()`, after
every covered graph was called, or at an orderly exit. A mark whose lock is free and that is still there is a service
that crashed. Two of them within 15 minutes: restore gives the next start an empty folder once, and clears them.
"""

from __future__ import annotations

import fcntl
import json
import os
import time

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
        start_id: CACHEPIPE_START_ID.
    """
    path = os.path.join(_folder(state_dir, digest), os.path.basename(start_id) or "unnamed")
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
    count = 0
    for path in _marks(state_dir, digest):
        began = _time_of_dead(path)
        count += began is not None and now - window_s <= began <= now + window_s
    return count


def clear(state_dir: str, digest: str) -> None:
    """Removes the marks of ended starts: the next start tries the artifact again. Never raises."""
    for path in _marks(state_dir, digest):
        if _time_of_dead(path) is not None:
            try:
                os.unlink(path)
            except OSError:
                continue


def _folder(state_dir: str, digest: str) -> str:
    return os.path.join(state_dir, "attempts", os.path.basename(digest) or "unnamed")


def _marks(state_dir: str, digest: str) -> list[str]:
    try:
        with os.scandir(_folder(state_dir, digest)) as found:
            return [item.path for item in found]
    except OSError:
        return []


def _time_of_dead(path: str) -> float | None:
    """Returns when an ended start began; None while its process lives. An unreadable mark counts by its mtime."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
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
