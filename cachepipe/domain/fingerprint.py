"""What an artifact depends on and torch's keys forget: named parts, a rule per part, differences in words.

A part that the artifact does not have is not compared (a CUDA artifact without native CPU code has no venv part). A
part whose name has no rule (an artifact of a newer cachepipe) always differs: an unknown rule never passes.

    torch            2.13.0+cu130                       gpu_name        NVIDIA H200
    torch_build      cf30153c… (git hash)               gpu_capability  9.0
    torch_debug      False                              gpu_cores       16896
    torch_cuda       13.0, or none                      gpu_memory      140 GiB
    triton           3.6.0, or none                     gpu_mig         none, or 1g.18gb
    python           cpython 3.11                       driver          580.65.06
    platform         linux                              cpu_isa         avx512_vnni+bf16
    machine          x86_64                             cpu_flags       avx avx2 … (sorted, one space)
    libc             glibc 2.36                         venv            /opt/venv
    device           cuda (a machine: all it serves)    compiler        g++ (Debian 12.2.0-14) 12.2.0
                                                        threads         8
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachepipe.domain.record import digest_parts
from cachepipe.errors import IntegrityError

SEVERAL = " + "
"""Joins the values of several visible GPUs that differ; such a part never fits."""

UNKNOWN = "unknown"
"""A GPU fact that this machine cannot tell because NVML is missing; the service compares torch's own record."""


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
    """Named parts, each name once; the order does not count.

    Raises:
        IntegrityError: a part is given twice.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise IntegrityError("fingerprint", "a part is given twice")

    @property
    def digest(self) -> str:
        return digest_parts({part.name: part.value for part in self.parts})

    def get(self, name: str) -> str | None:
        return next((part.value for part in self.parts if part.name == name), None)


@dataclass(frozen=True)
class Difference:
    """A part of the fingerprint that does not fit."""

    part: str
    wanted: str
    found: str | None
    """None: this machine does not have the part."""
    reason: str
    """In words, what the rule wants; empty for plain inequality."""


def _equal(wanted: str, found: str) -> str | None:
    return None if wanted == found else ""


def _gpu(wanted: str, found: str) -> str | None:
    if SEVERAL in wanted or SEVERAL in found:
        return "several visible models: choose one kind by CUDA_VISIBLE_DEVICES"
    return None if found == UNKNOWN else _equal(wanted, found)


def _superset(wanted: str, found: str) -> str | None:
    missing = sorted(set(wanted.split()) - set(found.split()))
    return f"missing {' '.join(missing)}" if missing else None


def _device(wanted: str, found: str) -> str | None:
    return "" if _superset(wanted, found) else None


def _version(text: str) -> tuple[int, ...] | None:
    return (
        tuple(int(number) for number in text.split("."))
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9}){0,5}", text)
        else None
    )


def _at_least(wanted: str, found: str) -> str | None:
    low, high = _version(wanted), _version(found)
    if low is None or high is None:
        return _equal(wanted, found)
    return None if high >= low else "lower than the builder's"


def _libc(wanted: str, found: str) -> str | None:
    family, _, low = wanted.partition(" ")
    found_family, _, high = found.partition(" ")
    return _at_least(low, high) if family == found_family else ""


def _isa(wanted: str, found: str) -> str | None:
    # Code for avx2 runs on a higher CPU: restore then pins ATEN_CPU_CAPABILITY=avx2, so that torch asks for it.
    is_lowered = wanted == "avx2" and found.startswith(("avx512", "amx"))
    return None if is_lowered else _equal(wanted, found)


def _threads(wanted: str, found: str) -> str | None:
    return (
        None
        if wanted == found
        else f"set OMP_NUM_THREADS={wanted}, or build with this thread count or `cpp.dynamic_threads`"
    )


Rule = Callable[[str, str], "str | None"]
"""(wanted, found) → None when it fits, else the reason in words (may be empty)."""

RULES: Mapping[str, Rule] = {
    "torch": _equal,
    "torch_build": _equal,
    "torch_debug": _equal,
    "torch_cuda": _equal,
    "triton": _equal,
    "python": _equal,
    "platform": _equal,
    "machine": _equal,
    "libc": _libc,
    "device": _device,
    "gpu_name": _gpu,
    "gpu_capability": _gpu,
    "gpu_cores": _gpu,
    "gpu_memory": _gpu,
    "gpu_mig": _gpu,
    "driver": _at_least,
    "cpu_isa": _isa,
    "cpu_flags": _superset,
    "venv": _equal,
    "compiler": _equal,
    "threads": _threads,
}
"""The rule of every part, in the order in which fingerprints list them."""

MAY_BE_ABSENT = frozenset({"compiler"})
"""Parts that a machine may lack: without a compiler, restore puts a stub on PATH that answers as the builder's."""


def differences(wanted: Fingerprint, found: Fingerprint) -> tuple[Difference, ...]:
    """Returns every part of `wanted` that `found` does not satisfy by its rule; empty: it fits."""
    result = []
    for part in wanted.parts:
        value = found.get(part.name)
        reason = _judge(part, value)
        if reason is not None:
            result.append(Difference(part.name, part.value, value, reason))
    return tuple(result)


def _judge(part: Part, found: str | None) -> str | None:
    rule = RULES.get(part.name)
    if rule is None:
        return "this cachepipe has no rule for it: upgrade cachepipe"
    if found is None:
        return None if part.name in MAY_BE_ABSENT else ""
    return rule(part.value, found)


def describe(difference: Difference) -> str:
    """Returns `driver: wanted >= 580.65, found 570.10 (lower than the builder's)`."""
    part, wanted, found = difference.part, difference.wanted, difference.found
    if part == "threads" and found is not None:
        return f"expected miss: threads {wanted} to {found} ({difference.reason})"
    bound = ">= " if part in ("driver", "libc") else ""
    text = f"{part}: wanted {bound}{wanted}, found {'none' if found is None else found or 'nothing'}"
    return f"{text} ({difference.reason})" if difference.reason else text


def notes(wanted: Fingerprint, found: Fingerprint) -> tuple[str, ...]:
    """Returns what fits but is worth a line: a newer driver or libc, a lowered vector ISA, facts that could not be read."""
    result = []
    for part in wanted.parts:
        value = found.get(part.name)
        if (
            value is None
            or value == part.value
            or part.name in ("cpu_flags", "device")
            or _judge(part, value) is not None
        ):
            continue
        result.append(f"{part.name}: built with {part.value}, here {value}")
    return tuple(result)
