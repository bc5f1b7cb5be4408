"""cachepipe: the cold start of `torch.compile`, moved from the service's start into CI.

Importing this package imports nothing else: `cachepipe restore` answers in milliseconds, and a service
pays only for what it uses.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "attach": "cachepipe.runtime.attach",
    "covered": "cachepipe.runtime.service",
    "entry": "cachepipe.runtime.service",
    "ready": "cachepipe.runtime.service",
    "register_metrics": "cachepipe.runtime.metrics",
    "report": "cachepipe.runtime.service",
}

if TYPE_CHECKING:
    from cachepipe.runtime.attach import attach as attach
    from cachepipe.runtime.metrics import register_metrics as register_metrics
    from cachepipe.runtime.service import covered as covered
    from cachepipe.runtime.service import entry as entry
    from cachepipe.runtime.service import ready as ready
    from cachepipe.runtime.service import report as report

__all__ = ["__version__", "attach", "covered", "entry", "ready", "register_metrics", "report"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module `cachepipe` has no attribute `{name}`")
    return getattr(import_module(home), name)
