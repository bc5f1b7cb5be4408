"""The index of a channel: which statements are current, version by version.

Version N+1 is a new object named by its number, created only if absent; nothing is overwritten. On the wire it is a DSSE
envelope (`domain/trust.py`) with this payload in canonical bytes:

    {"channel":"stable","created_at":"2026-11-30T10:00:00Z","expires_at":"2026-12-14T10:00:00Z","format":1,
     "name":"text-encoder","nonce":"…","revoked":[],"rows":[{…IndexRow…}],"version":42}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from cachepipe.domain.fingerprint import Fingerprint, Part, describe, differences
from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.record import read_record, record_bytes
from cachepipe.errors import FingerprintMismatchError, IntegrityError, MissError, TrustError

FORMAT = 1
PAYLOAD_TYPE = "application/vnd.cachepipe.index+json"
LIFETIME = timedelta(days=14)
"""A frozen channel is noticed within it; the publisher renews weekly."""
_NAMED = 3
"""Revoked digests in one message."""


@dataclass(frozen=True)
class IndexRow:
    """One current statement: one release × target."""

    artifact: str
    """ULID of the artifact."""
    statement: str
    """SHA-256 of the statement's envelope."""
    size_bytes: int
    """Of the envelope."""
    packs_bytes: int
    """Compressed bytes that a restore fetches."""
    device: str
    fingerprint: tuple[Part, ...]
    created_at: str


@dataclass(frozen=True)
class Index:
    """One version of a channel."""

    format: int
    name: str
    channel: str
    version: int
    created_at: str
    expires_at: str
    nonce: str
    """Fresh random text: tells the writer after a lost answer whether the version is its own."""
    rows: tuple[IndexRow, ...]
    revoked: tuple[str, ...] = ()


def timestamp(now: datetime) -> str:
    """Returns RFC 3339 in UTC, whole seconds."""
    return now.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str, what: str) -> datetime:
    """Returns the time in `text`, exactly as `timestamp` writes it. Not by strptime, whose import takes 3 ms of a restore.

    Raises:
        IntegrityError: another form.
    """
    try:
        found = datetime.fromisoformat(text.removesuffix("Z")).replace(tzinfo=timezone.utc)
    except ValueError as error:
        raise IntegrityError(what, f"not a time: {text[:40]!r}") from error
    if timestamp(found) != text:
        raise IntegrityError(what, f"not a time as `2026-11-30T10:00:00Z`: {text[:40]!r}")
    return found


def age_warning(label: str, created_at: str, ends_at: str, now: datetime) -> str:
    """Returns a warning from the middle of an index's life on; empty before.

    Args:
        label: `name@channel:version`.
        created_at: of the index.
        ends_at: its expiry by its own word or the policy's (`freshness.expiry`).
        now: of this start.

    Raises:
        IntegrityError: one of them is no time.
    """
    created, ends = parse_timestamp(created_at, label), parse_timestamp(ends_at, label)
    if now - created < (ends - created) / 2:
        return ""
    return f"{label} expires at {ends_at}: more than half of its life is over, renew it (`cachepipe renew`)"


def first_index(name: str, channel: str, rows: tuple[IndexRow, ...], now: datetime, nonce: str) -> Index:
    """Returns version 1 of a channel."""
    return Index(FORMAT, name, channel, 1, timestamp(now), timestamp(now + LIFETIME), nonce, rows)


def advance(index: Index, rows: tuple[IndexRow, ...], now: datetime, nonce: str) -> Index:
    """Returns the next version with these rows; revocations are kept."""
    return dataclasses.replace(
        index,
        version=index.version + 1,
        created_at=timestamp(now),
        expires_at=timestamp(now + LIFETIME),
        nonce=nonce,
        rows=rows,
    )


def with_row(rows: Sequence[IndexRow], row: IndexRow) -> tuple[IndexRow, ...]:
    """Returns the rows with `row` in place of the one for the same target.

    Targets are the same when each satisfies the other: an older driver's row stays beside a newer driver's.
    """
    return (*(old for old in rows if not _is_same_target(old, row)), row)


def _is_same_target(one: IndexRow, other: IndexRow) -> bool:
    left, right = Fingerprint(one.fingerprint), Fingerprint(other.fingerprint)
    return one.device == other.device and not differences(left, right) and not differences(right, left)


def index_bytes(index: Index) -> bytes:
    return record_bytes(index)


def read_index(payload: bytes, name: str, channel: str, version: int, limits: Limits = LIMITS) -> Index:
    """Returns the index in `payload`, which must be the very one that was asked for.

    Raises:
        IntegrityError: not strict, unknown format, or another name, channel or version than asked for.
    """
    index = read_record(Index, payload, f"index {name}@{channel}:{version}", limits.index_bytes)
    asked = (FORMAT, name, channel, version)
    found = (index.format, index.name, index.channel, index.version)
    if found != asked:
        raise IntegrityError("index", "not the one asked for", wanted=asked, found=found)
    return index


def nothing_current(what: str, revoked: Sequence[str]) -> MissError:
    """Returns the error for an index without rows: what it revokes is why."""
    if not revoked:
        return MissError(f"nothing is published: {what}")
    names = ", ".join(digest[:12] for digest in revoked[:_NAMED]) + (", …" if len(revoked) > _NAMED else "")
    return MissError(
        f"nothing is published: {what}: all of it was revoked ({names})",
        hint="build and publish it anew, or roll the channel back",
    )


def select(rows: Sequence[IndexRow], machine: Fingerprint, what: str, revoked: Sequence[str] = ()) -> IndexRow:
    """Returns the newest row that fits this machine.

    Args:
        rows: of an index or a lock file.
        machine: this machine's parts; a row of a device that is not among them does not fit.
        what: name and channel, for messages.
        revoked: statement digests that are refused.

    Raises:
        MissError: no rows; where digests are revoked, they are named.
        TrustError: all rows are revoked.
        FingerprintMismatchError: none fits; the differences are those of the row with the fewest.
    """
    usable = [row for row in rows if row.statement not in revoked]
    if rows and not usable:
        names = ", ".join(f"{row.artifact} ({row.statement[:12]})" for row in rows)
        raise TrustError(f"revoked: {what}: {names}", hint="build and publish it anew, or roll the channel back")
    if not usable:
        raise nothing_current(what, revoked)
    judged = sorted(
        ((differences(Fingerprint(row.fingerprint), machine), row) for row in usable), key=lambda pair: len(pair[0])
    )
    fits = [row for found, row in judged if not found]
    if not fits:
        raise FingerprintMismatchError([describe(difference) for difference in judged[0][0]])
    return max(fits, key=lambda row: (row.created_at, row.artifact))
