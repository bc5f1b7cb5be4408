"""Was the GPU quiet while kernels were timed? Decided from samples; what a noisy choice costs stays in the artifact for good.

A GPU is not quiet when other processes use it, when it is throttled, or when its clock moves under load. The clock of an idle GPU is
low and rises with the first kernel: only samples count that find it at work and follow another one that did. Tuning is bursts of
a few milliseconds, which the driver's load, a mean over a second, shows as nothing: what tells is that the GPU is not idle.

Source: NVML API reference, nvmlClocksEventReasons (the bits of `throttle`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cachepipe.domain.record import Json

BUSY_PERCENT = 10
CLOCK_SPREAD = 0.10
"""Of the median: a moving clock changes which candidate wins by about as much."""
MOVED_SHARE = 0.10
"""So many busy samples may lie outside of it: one dip does not decide a search of many repetitions."""

IDLE = 0x1
POWER_CAP = 0x4
THROTTLES = {
    0x8: "slowed down by the hardware",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""Bits that are never normal; the power cap alone is, for moments."""


@dataclass(frozen=True)
class GpuSample:
    """One look at the GPU."""

    busy_percent: int
    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    throttle: int
    """Bit mask of the reasons why the clock is lower than it could be."""
    strangers: int
    """Processes on the GPU that are none of ours."""


def noises(samples: Sequence[GpuSample]) -> tuple[str, ...]:
    """Returns what disturbed the GPU, in words; empty: it was quiet."""
    found = []
    strangers = max((sample.strangers for sample in samples), default=0)
    if strangers:
        found.append(f"{strangers} other process{'es' if strangers > 1 else ''} used it")
    for bit, words in THROTTLES.items():
        if any(sample.throttle & bit for sample in samples):
            hottest = max(sample.temperature_c for sample in samples)
            found.append(f"throttled: {words}, up to {hottest} °C")
    busy = _steady(samples)
    capped = sum(bool(sample.throttle & POWER_CAP) for sample in busy)
    if capped > MOVED_SHARE * len(busy) and capped > 1:
        found.append(f"throttled: at its power limit in {capped} of {len(busy)} samples")
    clocks = [sample.sm_mhz for sample in busy]
    middle = statistics.median(clocks) if clocks else 0
    moved = [clock for clock in clocks if abs(clock - middle) > CLOCK_SPREAD * middle]
    if len(moved) > MOVED_SHARE * len(clocks) and len(moved) > 1:
        found.append(f"its clock moved: {min(clocks)} to {max(clocks)} MHz under load")
    return tuple(found)


def _steady(samples: Sequence[GpuSample]) -> list[GpuSample]:
    return [now for before, now in pairwise(samples) if _is_at_work(before) and _is_at_work(now)]


def _is_at_work(sample: GpuSample) -> bool:
    return sample.busy_percent >= BUSY_PERCENT or not sample.throttle & IDLE


def summary(samples: Sequence[GpuSample]) -> Json:
    """Returns the statement's record of the samples: smallest, median and largest of what matters; clocks under load."""
    busy = _steady(samples) or list(samples)
    return {
        "samples": len(samples),
        "busy_samples": len(_steady(samples)),
        "sm_mhz": _spread([sample.sm_mhz for sample in busy]),
        "memory_mhz": _spread([sample.memory_mhz for sample in busy]),
        "temperature_c": _spread([sample.temperature_c for sample in samples]),
        "power_w": _spread([sample.power_w for sample in busy]),
        "throttle": sorted({f"{bit:#x}" for sample in samples for bit in _bits(sample.throttle)}),
        "noises": list(noises(samples)),
    }


def _bits(mask: int) -> list[int]:
    return [1 << place for place in range(mask.bit_length()) if mask >> place & 1]


def _spread(values: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in (min(values), statistics.median(values), max(values))] if values else []
