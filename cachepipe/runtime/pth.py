"""Imported by the `.pth` line of the wheel when `CACHEPIPE_ATTACH=1`: attaches as soon as `torch._inductor` is imported.

It runs in every Python process of the service, so it imports next to nothing and never raises. torch's own compile and
tuning processes look nothing up and are not attached; they count their work for the process that started them, if that one
is recorded (`CACHEPIPE_WORK_LOG`, runtime/childwork.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType

from cachepipe.importing import when_imported

TRIGGER = "torch._inductor"
_WORKERS = ("compile_worker", "autotune_process", "__autotune_main__")
"""In the command line of torch's child processes."""


def _attach(module: ModuleType) -> None:
    from cachepipe.runtime.attach import attach

    attach()


def _count(module: ModuleType) -> None:
    from cachepipe.runtime.childwork import VARIABLE, count_in_child

    count_in_child(os.environ.get(VARIABLE, ""))


def _arm() -> Callable[[], None]:
    if any(name in word for word in sys.orig_argv for name in _WORKERS):
        return when_imported(TRIGGER, _count) if os.environ.get("CACHEPIPE_WORK_LOG") else lambda: None
    return when_imported(TRIGGER, _attach) if os.environ.get("CACHEPIPE_ATTACH") == "1" else lambda: None


disarm = _arm()
"""Stops waiting: for processes that record by themselves."""
