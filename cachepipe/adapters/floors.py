"""The highest index version that this node has seen, per channel: it may raise the policy's floor, never lower it.

    <state>/floors/<name>@<channel>              a number
    <state>/floors/<store16>/<name>@<channel>    the same of one store, where no folder of the release was known yet

A store that plays an older version back is so noticed by every node that has seen a newer one. Whoever can write this file
can do no more than refuse us a start with the cache, or what could be done without the file.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass

from cachepipe.adapters.regular_file import open_regular
from cachepipe.domain.limits import LIMITS

FOLDER = "floors"
_LOCK_S, _POLL_S = 1.0, 0.005


@dataclass(frozen=True)
class Floor:
    """Where the floor of one channel lies."""

    state_dir: str
    name: str
    channel: str
    store: str = ""
    """A tag of the store whose channel alone it bounds; empty: of whatever store."""

    @property
    def path(self) -> str:
        return os.path.join(self.state_dir, FOLDER, self.store, f"{self.name}@{self.channel}")

    def seen(self) -> int:
        """Returns the highest version seen, 0 if none is known; never raises."""
        try:
            with os.fdopen(open_regular(self.path, follows_links=False), "rb") as file:
                owner = os.fstat(file.fileno()).st_uid
                text = file.read(LIMITS.small_file_bytes).strip()
        except OSError:
            return 0
        return int(text) if owner in (0, os.geteuid()) and text.isdigit() and len(text) <= 10 else 0

    def remember(self, version: int) -> bool:
        """Writes a version down if it is higher than the one that is there; returns whether the floor is as high now."""
        if version <= self.seen():
            return True
        path = self.path
        temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            handle = _alone_in(os.path.dirname(path))
            try:
                if version > self.seen():  # another start may have written a higher one meanwhile
                    with open(temporary, "xb") as file:
                        file.write(b"%d\n" % version)
                    os.replace(temporary, path)
            finally:
                os.close(handle)
        except OSError:
            return False
        return True


def _alone_in(folder: str) -> int:
    """Returns a descriptor that holds the folder's lock; after a moment one without: a stopped holder makes nobody forget."""
    handle, until = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + _LOCK_S
    while time.monotonic() < until:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:
            break  # a file system without locks
        else:
            break
    return handle
