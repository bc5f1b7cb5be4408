"""What an artifact depends on and torch's keys forget: named parts, a rule per part, differences in words.

A part that the artifact does not have is not compared (a CUDA artifact without native CPU code has no venv part).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachepipe.domain.record import digest_parts


@dataclass(frozen=True)
class Part:
    """One named fact; sets (CPU flags) are sorted and joined by one space."""

    name: str
    value: str

    @property
    def digest(self) -> str:
        return digest_parts({self.name: self.value})


@dataclass(frozen=True)
class Fingerprint:
    parts: tuple[Part, ...]

    @property
    def digest(self) -> str:
        return digest_parts({part.name: part.value for part in self.parts})

    def get(self, name: str) -> str | None:
        return next((part.value for part in self.parts if part.name == name), None)


@dataclass(frozen=True)
class Difference:
    part: str
    wanted: str
    found: str | None
    reason: str


# The rules and their functions are filled in by the fingerprint work: see `RULES` below.
RULES: Mapping[str, Callable[[str, str], str | None]] = {}


def differences(wanted: Fingerprint, found: Fingerprint) -> tuple[Difference, ...]:
    """Returns every part of `wanted` that `found` does not satisfy by its rule; empty: it fits."""
    raise NotImplementedError


def describe(difference: Difference) -> str:
    """Returns `driver: wanted >= 580.65, found 570.10`."""
    raise NotImplementedError
