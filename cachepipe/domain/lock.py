"""`cachepipe.lock`: the statements that an image accepts, by digest, as package managers pin wheels.

With a lock no index is read: no rollback, no freeze, no clock. It lies where people edit files, so every field is checked
as a trust policy's. Written in canonical bytes:

    {"channel":"stable","format":1,"name":"text-encoder","root":"/var/cache/cachepipe/text-encoder","rows":[{…}],"version":42}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.index import Index, IndexRow, parse_timestamp
from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.names import is_name
from cachepipe.domain.record import is_digest, read_record, record_bytes
from cachepipe.domain.ulid import is_ulid
from cachepipe.domain.variables import is_root
from cachepipe.errors import IntegrityError

FORMAT = 1
_MOST_TOLD = 10


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
        IntegrityError: not strict, of an unknown format, or a field out of range; all of these are named.
    """
    try:
        lock = read_record(Lock, data, "lock file", limits.index_bytes)
        if lock.format != FORMAT:
            raise IntegrityError("lock file", "unknown format", wanted=FORMAT, found=lock.format)
        problems = list(_problems(lock, limits))
        if problems:
            more = len(problems) - _MOST_TOLD
            raise IntegrityError(
                "lock file", "; ".join(problems[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")
            )
    except IntegrityError as error:
        error.hint = "this is no lock file of this version: `cachepipe lock … --output FILE` writes one"
        raise
    return lock


def _problems(lock: Lock, limits: Limits) -> Iterator[str]:
    for what, text in (("release name", lock.name), ("channel", lock.channel)):
        if not is_name(text):
            yield f"not a {what}: {text[:80]!r}"
    if lock.version < 1:
        yield f"version {lock.version}, wanted 1 or more"
    if lock.root and not is_root(lock.root):
        yield f"root is not an absolute path: {lock.root[:80]!r}"
    if len({row.statement for row in lock.rows}) < len(lock.rows):
        yield "a statement is pinned twice"
    for number, row in enumerate(lock.rows):
        yield from (f"rows[{number}]: {problem}" for problem in _row_problems(row, limits))


def _row_problems(row: IndexRow, limits: Limits) -> Iterator[str]:
    if not is_ulid(row.artifact):
        yield f"not an artifact id: {row.artifact[:80]!r}"
    if not is_digest(row.statement):
        yield f"not a statement digest: {row.statement[:80]!r}"
    if not 1 <= row.size_bytes <= limits.statement_bytes:
        yield f"size_bytes {row.size_bytes}, wanted 1..{limits.statement_bytes}"
    if row.packs_bytes < 0:
        yield f"packs_bytes {row.packs_bytes}, wanted 0 or more"
    try:
        Fingerprint(row.fingerprint)
        parse_timestamp(row.created_at, "created_at")
    except IntegrityError as error:
        yield str(error)
