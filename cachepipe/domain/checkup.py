"""One fact of a machine with its verdict, and what a list of them comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "fail"


@dataclass(frozen=True)
class Check:
    section: str
    name: str
    value: str
    verdict: str = OK
    """`ok`; `note`: worth knowing; `warn`: costs time or safety; `fail`: a start here will not be warm."""
    advice: str = ""
    """What to do; empty for `ok`."""


@dataclass(frozen=True)
class Checkup:
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict == FAIL)

    @property
    def is_healthy(self) -> bool:
        return not self.failures


def sections(checks: Sequence[Check]) -> dict[str, list[Check]]:
    """Returns section → its checks, both in the order of the list."""
    found: dict[str, list[Check]] = {}
    for check in checks:
        found.setdefault(check.section, []).append(check)
    return found
