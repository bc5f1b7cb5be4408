"""Whose turn it is on a GPU: builds of one user on one machine share it, except while one of them tunes.

Two locks per GPU. Who waits for the GPU holds the gate, so that later ones queue up behind: a tuning build is not kept waiting
for ever by others that take turns. Both are flocks, free when their holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator

from cachepipe.adapters.folders import lock_file


@contextlib.contextmanager
def gpu_turn(uuid: str, is_alone: bool, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds a GPU while the body lasts.

    Args:
        uuid: of the GPU, `GPU-…` or `MIG-…`.
        is_alone: nobody else may use it meanwhile; else others that share it may.
        on_wait: called before waiting for others.
    """
    with _opened(f"{uuid}.gate") as gate, _opened(uuid) as turn:
        lock_file(gate, on_wait)
        if is_alone:
            lock_file(turn, on_wait)
        else:
            fcntl.flock(turn, fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int]:
    path = os.path.join(tempfile.gettempdir(), f"cachepipe-{os.getuid()}-{name}.lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)
