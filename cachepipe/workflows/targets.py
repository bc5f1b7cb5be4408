"""Which targets of a manifest this machine matches."""

from __future__ import annotations

from collections.abc import Callable

from cachepipe.adapters.machine import machine_fingerprint
from cachepipe.domain.manifest import Manifest, Target
from cachepipe.errors import BuildError


def matching_devices(manifest: Manifest, say: Callable[[str], None]) -> tuple[str, ...]:
    """Returns the devices of the targets that this machine matches, in the manifest's order.

    Args:
        manifest: with at least one target.
        say: gets one line per target that is skipped.

    Raises:
        BuildError: no target matches.
    """
    found: list[str] = []
    for target in manifest.targets:
        problem = _mismatch(target)
        if problem:
            say(f"target skipped: {_words(target)}: {problem}")
        elif target.device not in found:
            found.append(target.device)
    if not found:
        wanted = "; ".join(_words(target) for target in manifest.targets)
        hint = "run it on a machine that one of the targets names"
        raise BuildError(manifest.name, "plan", f"this machine matches no target: {wanted}", hint=hint)
    return tuple(found)


def _words(target: Target) -> str:
    return f"{target.device} {target.gpu}" if target.gpu else target.device


def _mismatch(target: Target) -> str:
    if target.device == "cpu":
        return ""
    name = machine_fingerprint(["cuda"], has_compiler_part=False).get("gpu_name")
    if name is None:
        return "no GPU is visible here"
    return f"this machine has {name}" if target.gpu not in (None, name) else ""
