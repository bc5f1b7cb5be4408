"""What the kernel says about the mount that a path lies on: kind, options, room."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cachepipe.adapters.cachedir import is_on_network


@dataclass(frozen=True)
class Mount:
    """The mount of an existing path, or of its nearest existing parent."""

    path: str
    """That was looked at."""
    point: str
    kind: str
    """`ext4`, `overlay`, `tmpfs`, `nfs4`, …; `unknown` without /proc."""
    is_read_only: bool
    is_noexec: bool
    is_network: bool
    size_bytes: int
    free_bytes: int
    free_inodes: int | None
    """None: the file system counts none."""


def mount_of(path: str, mountinfo: str = "/proc/self/mountinfo") -> Mount:
    """Returns the facts; raises OSError where even the nearest parent cannot be looked at."""
    there = os.path.abspath(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    facts = os.statvfs(there)
    point, kind = _point(os.path.realpath(there), mountinfo)
    return Mount(
        path=there,
        point=point,
        kind=kind,
        is_read_only=bool(facts.f_flag & os.ST_RDONLY),
        is_noexec=bool(facts.f_flag & os.ST_NOEXEC),
        is_network=is_on_network(there),
        size_bytes=facts.f_blocks * facts.f_frsize,
        free_bytes=facts.f_bavail * facts.f_frsize,
        free_inodes=facts.f_favail if facts.f_files else None,
    )


def _point(real: str, mountinfo: str) -> tuple[str, str]:
    best, kind = "/", "unknown"
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split() for line in file]
    except OSError:
        return best, kind
    for fields in lines:
        point = fields[4].replace("\\040", " ")
        if f"{real}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(best):
            best, kind = point, fields[fields.index("-") + 1]
    return best, kind
