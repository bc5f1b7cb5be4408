"""Two releases beside each other: what became faster, slower, larger, and what misses now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cachepipe.domain.evidence import KindSize
from cachepipe.workflows.report import BucketRow, Report

NOTABLE = 0.1
"""Changes below ten percent are noise between two runs."""


@dataclass(frozen=True)
class ComparedBucket:
    """One shape bucket; None where a side does not have it."""

    entry: str
    shape_bucket: str
    before_s: float | None
    """Restored first call."""
    now_s: float | None
    change: float | None
    """now ÷ before − 1."""
    verdict: str
    """`faster`, `slower`, `same`, `new`, `gone`."""
    graphs_before: int
    graphs_now: int


@dataclass(frozen=True)
class Comparison:
    shape_buckets: tuple[ComparedBucket, ...]
    hit_rate_before: float | None
    hit_rate_now: float | None
    size_before: int
    """Restored bytes."""
    size_now: int
    sizes: Mapping[str, tuple[int, int]]
    """Kind of file → bytes before and now."""
    new_misses: tuple[str, ...]
    mended_misses: tuple[str, ...]
    torch_versions: tuple[str, str]


def compare(before: Report, now: Report) -> Comparison:
    """Returns what changed between two reports."""
    old = {(row.entry, row.shape_bucket): row for row in before.shape_buckets}
    new = {(row.entry, row.shape_bucket): row for row in now.shape_buckets}
    rows = [_compared(place, old.get(place), new.get(place)) for place in dict.fromkeys([*new, *old])]
    kinds = sorted({*before.details.sizes, *now.details.sizes})
    none = KindSize(0, 0)
    sizes = {
        kind: (before.details.sizes.get(kind, none).size_bytes, now.details.sizes.get(kind, none).size_bytes)
        for kind in kinds
    }
    return Comparison(
        shape_buckets=tuple(rows),
        hit_rate_before=before.hit_rate,
        hit_rate_now=now.hit_rate,
        size_before=sum(pair[0] for pair in sizes.values()),
        size_now=sum(pair[1] for pair in sizes.values()),
        sizes=sizes,
        new_misses=tuple(miss for miss in dict.fromkeys(now.misses) if miss not in before.misses),
        mended_misses=tuple(miss for miss in dict.fromkeys(before.misses) if miss not in now.misses),
        torch_versions=(before.details.torch_version, now.details.torch_version),
    )


def _compared(place: tuple[str, str], old: BucketRow | None, new: BucketRow | None) -> ComparedBucket:
    before, now = (row.restored_s if row else None for row in (old, new))
    change = round(now / before - 1, 4) if before and now is not None else None
    verdict = "same"
    if old is None or new is None:
        verdict = "new" if old is None else "gone"
    elif change is not None and abs(change) >= NOTABLE:
        verdict = "slower" if change > 0 else "faster"
    return ComparedBucket(*place, before, now, change, verdict, old.graphs if old else 0, new.graphs if new else 0)
