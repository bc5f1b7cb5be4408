"""Imported by the `.pth` line of the wheel when `CACHEPIPE_ATTACH=1`: attaches as soon as `torch._inductor` is imported.

It runs in every Python process of the service, so it imports next to nothing and never raises. torch's own compile
workers are left alone: they do nothing that is looked up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from cachepipe.importing import when_imported

TRIGGER = "torch._inductor"


def _attach(module: ModuleType) -> None:
    from cachepipe.runtime.attach import attach

    attach()


disarm: Callable[[], None] = (
    when_imported(TRIGGER, _attach) if not any("compile_worker" in word for word in sys.orig_argv) else lambda: None
)
"""Stops waiting: for processes that record by themselves."""
