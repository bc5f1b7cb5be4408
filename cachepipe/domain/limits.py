"""What a restore accepts at most, each limit with its unit and reason."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Limits:
    """The limits of a release; there is one instance."""

    index_bytes: int = MIB
    """A channel has a handful of targets; an index of 1 MiB names thousands."""
    statement_bytes: int = 256 * KIB
    """A hundred entries with their facts fit; what is bulky lives in the table and the explain data."""
    table_raw_bytes: int = 8 * MIB
    """20,000 rows of about 300 bytes."""
    explain_raw_bytes: int = 64 * MIB
    """About 0.6 MB a graph; never fetched by a restore."""
    pack_raw_bytes: int = 8 * MIB
    """Best wall time per core in the measurements, and the size of each fetcher's buffer."""
    unpacked_bytes: int = 8 * GIB
    files: int = 20_000
    file_bytes: int = GIB
    segments: int = 1024
    """Of one file: the largest file in whole packs has 128."""
    path_bytes: int = 512
    path_parts: int = 16
    signatures: int = 8
    probes: int = 64
    """Index versions looked at above the hint: a lying hint costs time, never more than this."""
    tries: int = 4
    """Per pack, around read and verify."""
    small_file_bytes: int = 64 * KIB
    """Hint, marker, lock and state files."""


LIMITS = Limits()
