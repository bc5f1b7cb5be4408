"""What a look at a store found: each problem and each note, by its place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    is_problem: bool
    where: str
    """A key of the store, a channel's version, an artifact, or a signing key's address."""
    what: str
