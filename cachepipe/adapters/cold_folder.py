"""Empty folders of cold starts: `<scratch>/cold.<random>`, each used by one service and removed when nobody uses it.

A service holds a shared lease on its folder, as on a restored one. What is older than an hour and held by nobody is renamed
to `gone.<random>`, so that a removal that is cut short goes on at the next start, and removed. A folder without a lease file
is never touched: a shell that read `--env-file` may use it after our command, and holds nothing.

The names of scratch places can be guessed, so another user may stand at all of them and have prepared torch's default folder as
well, which torch takes as it is. Then ours is `<scratch>.<16 hex digits>`, found again by who owns it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from cachepipe.adapters.cachedir import (
    STALE_S,
    Need,
    check_private,
    check_usable,
    is_on_network,
    make_private,
    mkdir_private,
)
from cachepipe.adapters.lease import NAME, Lease
from cachepipe.errors import CachepipeError, UnsafePathError

SWEEP_S = 0.2
"""A start does not wait longer for what others have left."""
_COLD, _GONE = "cold.", "gone."
_RANDOM_BYTES, _HEX = 8, frozenset("0123456789abcdef")
_MOST_BESIDE = 64
"""Names like ours that are looked at; another user may have made any number."""


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
        for path in _made(places, has_room):
            return ColdFolder(path, Lease.take(path, is_shared=True) if is_held else None)
    return None


def writable_place(places: Sequence[str]) -> str:
    """Returns the folder of the first place that can be written now; empty: none can."""
    parents = dict.fromkeys([*map(os.path.dirname, places), "/var/tmp"])
    return next((path for path in parents if os.access(path, os.W_OK | os.X_OK, effective_ids=True)), "")


def _made(places: Sequence[str], has_room: bool) -> Iterator[str]:
    """Yields new folders: in the places, then beside those at whose name something else stands."""
    taken = []
    for place in places:
        with suppress(CachepipeError, OSError):
            try:
                make_private(place)
            except UnsafePathError:
                taken.append(place)
                continue
            yield _new_folder(place, has_room)
    for place in taken:
        with suppress(CachepipeError, OSError):
            yield _new_beside(place, has_room)


def _new_beside(place: str, has_room: bool) -> str:
    """As `_new_folder`, in an earlier folder of ours beside a place, or in a new one that stays only if it is of use."""
    if earlier := next(_found_beside(place), ""):
        return _new_folder(earlier, has_room)
    path = f"{place}.{os.urandom(_RANDOM_BYTES).hex()}"
    make_private(path)
    try:
        return _new_folder(path, has_room)
    except (CachepipeError, OSError):
        os.rmdir(path)
        raise


def _found_beside(place: str) -> Iterator[str]:
    """Yields the folders that `_new_beside` made; their modes are left as they are, for another may have a name like theirs."""
    try:
        with os.scandir(os.path.dirname(place)) as found:
            names = list(islice((item.path for item in found if _is_beside(place, item.path)), _MOST_BESIDE))
    except OSError:
        return
    for path in sorted(names):
        try:
            check_private(path, closes=False)
        except (UnsafePathError, OSError):
            continue
        yield path


def _is_beside(place: str, path: str) -> bool:
    random = path.removeprefix(f"{place}.")
    return random != path and len(random) == 2 * _RANDOM_BYTES and set(random) <= _HEX


def _new_folder(place: str, has_room: bool) -> str:
    if has_room:
        check_usable(place, Need(0, 0))
    path = os.path.join(place, f"{_COLD}{os.urandom(8).hex()}")
    mkdir_private(path)
    return path


def sweep_cold(places: Sequence[str], now: float, limit_s: float = SWEEP_S) -> None:
    """Removes cold folders that nobody holds and that are older than an hour, as far as time allows; never raises.

    Args:
        places: private folders of ours; those on a network file system, where locks do not count, are left alone.
        now: seconds since the epoch.
        limit_s: the rest waits for the next start.
    """
    until = time.monotonic() + limit_s
    for place in _ours(places):
        try:
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


def _ours(places: Sequence[str]) -> Iterator[str]:
    for place in places:
        try:
            if not os.path.lexists(place) or is_on_network(place):
                continue
            check_private(place)
            yield place
        except UnsafePathError:
            yield from _found_beside(place)
        except OSError:
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
