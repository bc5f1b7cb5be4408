"""`cachepipe.lock`: the statements that an image accepts, by digest, as package managers pin wheels.

With a lock no index is read: no rollback, no freeze, no clock. Written in canonical bytes:

    {"channel":"stable","format":1,"name":"text-encoder","root":"/var/cache/cachepipe/text-encoder","rows":[{…}],"version":42}
"""

from __future__ import annotations

from dataclasses import dataclass

from cachepipe.domain.index import Index, IndexRow
from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.record import read_record, record_bytes
from cachepipe.errors import IntegrityError

FORMAT = 1


@dataclass(frozen=True)
class Lock:
    """What a lock file says."""

    format: int
    name: str
    channel: str
    """Where the rows came from; for people."""
    version: int
    rows: tuple[IndexRow, ...]
    root: str = ""
    """Where the artifacts are restored, so that a start that finds them there asks nobody; empty: not known."""


def lock_of(index: Index, root: str = "") -> Lock:
    """Returns the lock that pins every current statement of an index."""
    return Lock(FORMAT, index.name, index.channel, index.version, index.rows, root)


def lock_bytes(lock: Lock) -> bytes:
    return record_bytes(lock)


def read_lock(data: bytes, limits: Limits = LIMITS) -> Lock:
    """Returns the lock in `data`.

    Raises:
        IntegrityError: not strict, or of an unknown format.
    """
    try:
        lock = read_record(Lock, data, "lock file", limits.index_bytes)
        if lock.format != FORMAT:
            raise IntegrityError("lock file", "unknown format", wanted=FORMAT, found=lock.format)
    except IntegrityError as error:
        error.hint = "this is no lock file of this version: `cachepipe lock … --output FILE` writes one"
        raise
    return lock
