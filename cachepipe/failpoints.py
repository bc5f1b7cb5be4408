"""Named places at which a test ends the process as a power cut would; nothing without `CACHEPIPE_FAILPOINT`."""

from __future__ import annotations

import os
import signal

POINTS = (
    "publish.after_format",
    "publish.after_pin",
    "publish.after_first_pack",
    "publish.after_packs",
    "publish.after_statement",
    "publish.after_read_back",
    "publish.after_index",
    "publish.after_hint",
    "store.before_link",
    "store.after_link",
)
"""Those of publish and its store; restore names its own in the same way."""


def reached(name: str) -> None:
    """Kills this process without any clean-up if the environment names this point."""
    if os.environ.get("CACHEPIPE_FAILPOINT") == name:
        os.kill(os.getpid(), signal.SIGKILL)
