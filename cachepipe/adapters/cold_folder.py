"""Empty folders of cold starts: `<scratch>/cold.<random>`, each used by one service and removed when nobody uses it.

A service holds a shared lease on its folder, as on a restored one. What is older than an hour and held by nobody is renamed
to `gone.<random>`, so that a removal that is cut short goes on at the next start, and removed. A folder without a lease file
is never touched: a shell that read `--env-file` may use it after our command, and holds nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from cachepipe.adapters.cachedir import STALE_S, Need, check_private, check_usable, is_on_network, make_private
from cachepipe.adapters.lease import NAME, Lease
from cachepipe.errors import CachepipeError

SWEEP_S = 0.2
"""A start does not wait longer for what others have left."""
_COLD, _GONE = "cold.", "gone."


class ColdFolder(NamedTuple):
    path: str
    lease: Lease | None


def cold_folder(places: Sequence[str], *, asks_room: bool = True, is_held: bool = True) -> ColdFolder | None:
    """Returns a new empty private folder in the first of `places` that takes one; None if none does.

    Args:
        places: best first.
        asks_room: False: a full place is as good as any, because asking may never return (a dead mount).
        is_held: a lease is taken for whoever this process becomes.

    A full place is taken when no other has room: torch's own default, which another user may have made, is worse.
    """
    for has_room in (True, False) if asks_room else (False,):
        for place in places:
            try:
                make_private(place)
                if has_room:
                    check_usable(place, Need(0, 0))
                path = os.path.join(place, f"{_COLD}{os.urandom(8).hex()}")
                os.mkdir(path, 0o700)
                os.chmod(path, 0o700)
            except (CachepipeError, OSError):
                continue
            return ColdFolder(path, Lease.take(path, is_shared=True) if is_held else None)
    return None


def sweep_cold(places: Sequence[str], now: float, limit_s: float = SWEEP_S) -> None:
    """Removes cold folders that nobody holds and that are older than an hour, as far as time allows; never raises.

    Args:
        places: private folders of ours; those on a network file system, where locks do not count, are left alone.
        now: seconds since the epoch.
        limit_s: the rest waits for the next start.
    """
    until = time.monotonic() + limit_s
    for place in places:
        try:
            if not os.path.isdir(place) or is_on_network(place):
                continue
            check_private(place)
            with os.scandir(place) as found:
                names = sorted(item.name for item in found if item.is_dir(follow_symlinks=False))
            for name in names:
                path = os.path.join(place, name)
                if name.startswith(_COLD) and now - os.lstat(path).st_mtime > STALE_S:
                    path = _put_aside(path)
                if os.path.basename(path).startswith(_GONE) and not _is_removed(path, until):
                    return
        except (CachepipeError, OSError):
            continue


def _put_aside(path: str) -> str:
    """Returns the new name of a folder that nobody holds, else the old one."""
    lease = Lease.take(path, is_shared=False) if os.path.lexists(os.path.join(path, NAME)) else None
    if lease is None:
        return path
    try:
        gone = os.path.join(os.path.dirname(path), f"{_GONE}{os.urandom(8).hex()}")
        os.rename(path, gone)
        return gone
    finally:
        lease.close()


def _is_removed(tree: str, until: float) -> bool:
    for folder, folders, files in os.walk(tree, topdown=False):
        for name in files:
            os.unlink(os.path.join(folder, name))
            if time.monotonic() > until:
                return False
        for name in folders:
            path = os.path.join(folder, name)
            os.unlink(path) if os.path.islink(path) else os.rmdir(path)
    os.rmdir(tree)
    return True
