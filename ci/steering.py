"""The environment of a measurement or a test: without anything of this process that steers cachepipe or torch's caches."""

from __future__ import annotations

import os

STEERING = ("CACHEPIPE_", "TORCHINDUCTOR_", "TRITON_", "TORCH_")


def clean_environment(**extra: str) -> dict[str, str]:
    """Returns this process's environment without such variables, and with those given."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith(STEERING)}, **extra}
