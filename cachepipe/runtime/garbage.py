"""Fewer walks of the garbage collector while torch compiles or loads a graph.

A trace and the import of torch's compile stack make millions of objects of which nearly all live on, and CPython walks over
all of them again each time their number has grown: a quarter of that import. Between `begin` and `end` it waits for more
new objects; a compile that lasts minutes is still swept.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 50_000
"""New objects before the youngest are looked at; CPython starts with 700 or 2,000. Measured: 10,000 gain a little less, and
no collection at all gains no more."""

_lock = threading.Lock()
_open = 0
_found: tuple[int, int, int] | None = None


def begin() -> None:
    """Raises the threshold, once however many begin; one that is higher, or a collector that is off, stays."""
    global _open, _found  # noqa: PLW0603
    with _lock:
        _open += 1
        first, second, third = gc.get_threshold()
        if _open == 1 and gc.isenabled() and 0 < first < THRESHOLD:
            _found = first, second, third
            gc.set_threshold(THRESHOLD, second, third)


def end() -> None:
    """Puts the threshold back when the last one ends; what the service itself has set meanwhile stays."""
    global _open, _found  # noqa: PLW0603
    with _lock:
        _open = max(0, _open - 1)
        if not _open and _found is not None:
            if gc.get_threshold() == (THRESHOLD, *_found[1:]):
                gc.set_threshold(*_found)
            _found = None


def _after_fork() -> None:
    """The compiles of other threads are not in the child, and one of them may have held the lock."""
    global _lock, _open
    _lock, _open = threading.Lock(), 0
    end()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def rarely_collected() -> Iterator[None]:
    begin()
    try:
        yield
    finally:
        end()
