"""Objects of a folder store that were written long ago."""

from __future__ import annotations

import os
import time

from cachepipe.adapters.local_store import LocalStore
from cachepipe.domain.collect import DAY_S


def age(store: LocalStore, prefix: str, days: float) -> None:
    """Makes every object below `prefix` as old as if it had been written `days` ago."""
    then = time.time() - days * DAY_S
    for key in store.list(prefix):
        os.utime(os.path.join(store.root, key), (then, then))
