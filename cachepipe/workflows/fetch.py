"""Reading what is published, in the order opposite to writing: hint → index → probes → statement → table.

Nothing is parsed before its envelope was read strictly, enough of the store's trusted keys signed it (`store.trust`) and,
where a digest is known, it was compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from cachepipe.adapters.store import Store, is_absent_by_403
from cachepipe.domain import trust
from cachepipe.domain.artifact import FileTable, read_table
from cachepipe.domain.freshness import check_fresh
from cachepipe.domain.index import PAYLOAD_TYPE, Index, IndexRow, read_index
from cachepipe.domain.layout import FORMAT_BYTES, FORMAT_KEY, hint_key, index_key, pack_key, statement_key
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.names import check_name
from cachepipe.domain.record import parse_json, sha256
from cachepipe.domain.statement import Statement, read_statement
from cachepipe.domain.ulid import is_ulid
from cachepipe.errors import IntegrityError, MissError, StoreError, TrustError, UsageError

T = TypeVar("T")

_REF = re.compile(r"([a-z0-9._-]+)@([a-z0-9._-]+)(?::([0-9]{1,10}))?", re.ASCII)
_DIGEST_PREFIX = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


@dataclass(frozen=True)
class Channel:
    """The newest index of a channel."""

    index: Index
    version: int
    hint: int | None
    """What the hint said; None: absent or not a number."""
    status: str
    """As `trust.Verified.status`."""
    not_after: str
    """As `trust.Verified.not_after`."""


@dataclass(frozen=True)
class Artifact:
    """A statement as it was read and checked."""

    statement: Statement
    payload: bytes
    """The in-toto payload, as the envelope carried it."""
    envelope: bytes
    digest: str
    """SHA-256 of the envelope: the artifact's identity in rows and lock files."""
    status: str
    not_after: str
    """As `trust.Verified.not_after`."""


def row_of(statement: Statement, envelope: bytes) -> IndexRow:
    """Returns the row that names a statement: the one function that makes it, for publisher and reader alike."""
    return IndexRow(
        artifact=statement.artifact,
        statement=sha256(envelope),
        size_bytes=len(envelope),
        packs_bytes=sum(blob.size_bytes for blob in statement.packs) + statement.table.size_bytes,
        device=statement.device,
        fingerprint=statement.fingerprint,
        created_at=statement.created_at,
    )


def check_format(store: Store) -> bool:
    """Returns whether the store has a format that this release reads; False: nothing was published yet.

    Raises:
        StoreError: a format or features of another release.
    """
    data = store.get(FORMAT_KEY, LIMITS.small_file_bytes)
    if data is None or data == FORMAT_BYTES:
        return data is not None
    tree = parse_json(data, FORMAT_KEY, LIMITS.small_file_bytes)
    found = tree if isinstance(tree, dict) else {}
    raise StoreError(
        f"the store has format {found.get('format')!r} with features {found.get('features')!r}, "
        f"this release reads format 1 without features: {store.url}",
        hint="upgrade cachepipe, or use another store",
    )


def nothing_published(store: Store, what: str) -> MissError:
    """Returns the error for an absent channel or version; it tells an empty store, such as a folder where nothing is mounted."""
    if check_format(store):
        return MissError(f"nothing is published: {what} in {store.url}")
    return MissError(
        f"nothing is published: {what}: there is no store at {store.url}",
        hint="look whether the address is right and mounted; the first `cachepipe build` makes the store",
    )


def read_channel(store: Store, name: str, channel: str, now: datetime) -> Channel:
    """Returns the newest index of a channel, whatever its hint says, in at most `LIMITS.probes` probes.

    Raises:
        MissError: nothing is published there.
        TrustError: the newest index is not signed by trusted keys, has expired, or is below the policy's floor.
        IntegrityError, StoreError, UsageError: as `read_index_version`.
    """
    found = newest(store, name, channel)
    if found is None:
        raise nothing_published(store, f"{name}@{channel}")
    check_fresh(found.index, store.trust.policy, now)
    return found


def newest(store: Store, name: str, channel: str) -> Channel | None:
    """Returns the newest index of a channel without judging its age (publishers renew expired ones); None: none yet.

    Versions are contiguous, so the probes above the hint double their distance and then close in: one probe when the hint
    is right, and a hint that lies in any direction costs time, never an older version. Only the last one is opened: what
    lies below it may be signed by keys that have been retired since.
    """
    check_name(name, "the release name")
    check_name(channel, "the channel")
    hint = _read_hint(store, name, channel)
    seen: dict[int, bytes | None] = {}

    def probe(version: int) -> bytes | None:
        if version not in seen:
            if len(seen) > LIMITS.probes:
                raise IntegrityError(f"index {name}@{channel}", "no end within the probes", wanted=LIMITS.probes)
            try:
                seen[version] = store.get(index_key(name, channel, version), LIMITS.index_bytes)
            except StoreError as error:
                if all(data is None for data in seen.values()) or not is_absent_by_403(error):
                    raise
                seen[version] = None
        return seen[version]

    # an empty object is one: taken for absent, it would make the version below it the newest
    low = hint if hint and probe(hint) is not None else 0
    step = 1
    while probe(low + step) is not None:
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if probe(middle) is not None else (low, middle)
    last = probe(low) if low else None
    if last is None:
        check_format(store)
        return None
    return _open_index(store, last, (name, channel, low), hint)


def _reread(read: Callable[[], T]) -> T:
    """Returns what `read` returns; what it refuses is read again, for no client notices a byte that a network flipped.

    The same refusal twice is not the network's: the store holds that. Other refusals end after `LIMITS.tries`.
    """
    refusals: set[str] = set()
    while True:
        try:
            return read()
        except (IntegrityError, TrustError) as error:
            if str(error) in refusals or len(refusals) == LIMITS.tries - 1:
                raise
            refusals.add(str(error))


def _read_hint(store: Store, name: str, channel: str) -> int | None:
    try:
        data = store.get(hint_key(name, channel), LIMITS.small_file_bytes)
    except IntegrityError:
        return None  # a hint that cannot be one is no hint; it is unsigned and never decides
    text = (data or b"").strip()
    return int(text) if text.isdigit() and len(text) <= 10 else None


def _open_index(store: Store, first: bytes, asked: tuple[str, str, int], hint: int | None) -> Channel:
    """Returns what an index says that was just read; one that is refused is read again."""
    readings = [first]

    def read() -> Channel:
        again = None if readings else store.get(index_key(*asked), LIMITS.index_bytes)
        return _verified_index(store, readings.pop() if readings else again or b"", asked, hint)

    return _reread(read)


def _verified_index(store: Store, envelope: bytes, asked: tuple[str, str, int], hint: int | None) -> Channel:
    name, channel, version = asked
    what = f"index {name}@{channel}:{version}"
    verified = store.trust.verify(envelope, PAYLOAD_TYPE, what)
    index = read_index(verified.payload, name, channel, version)
    return Channel(index, version, hint, verified.status, verified.not_after)


def read_index_version(store: Store, name: str, channel: str, version: int, now: datetime | None) -> Channel:
    """Returns one version of a channel's index.

    Args:
        store: where.
        name: of the release.
        channel: of the release.
        version: from 1.
        now: time at which it must not have expired; None: history, of any age.

    Raises:
        MissError: that version does not exist.
        TrustError: not signed by trusted keys, or not fresh.
        IntegrityError: bytes that are not that index.
        StoreError: the store fails, or has another format.
        UsageError: a name that cannot be one.
    """
    check_name(name, "the release name")
    check_name(channel, "the channel")
    check_format(store)
    envelope = store.get(index_key(name, channel, version), LIMITS.index_bytes)
    if envelope is None:
        raise nothing_published(store, f"{name}@{channel}:{version}")
    found = _open_index(store, envelope, (name, channel, version), None)
    if now is not None:
        check_fresh(found.index, store.trust.policy, now)
    return found


def index_as_it_is(store: Store, name: str, channel: str, version: int) -> tuple[bytes, Index]:
    """Returns the envelope of one version and what it says, whoever signed it and however old it is.

    For those who decide nothing by it: gc, which keeps what it names, and copy, which carries it.

    Raises:
        IntegrityError: missing, or bytes that are not that index.
        TrustError: an envelope of another type.
        StoreError: the store fails.
    """
    what = f"index {name}@{channel}:{version}"
    envelope = store.get(index_key(name, channel, version), LIMITS.index_bytes)
    if envelope is None:
        raise IntegrityError(what, "missing in the store")
    return envelope, read_index(trust.open_envelope(envelope, PAYLOAD_TYPE, what).payload, name, channel, version)


def read_artifact(store: Store, row: IndexRow, release: str | None = None, *, is_pinned: bool = False) -> Artifact:
    """Returns the artifact that a row names, its statement equal to the row in every field.

    Args:
        store: where.
        row: of an index or a lock file.
        release: the name that was asked for; None: any.
        is_pinned: the row is a lock file's: ended keys count too, for the digest says which bytes were meant.

    Raises:
        IntegrityError: the statement is missing, its size, digest or content differs from the row, or it belongs to another release.
        TrustError: not signed by trusted keys, or revoked by the policy.
        StoreError: the store fails.
    """
    return _reread(lambda: _read_artifact(store, row, release, is_pinned))


def _read_artifact(store: Store, row: IndexRow, release: str | None, is_pinned: bool) -> Artifact:
    what = f"statement of artifact {row.artifact[:40]}"
    found = _read_statement(store, row.artifact, row.statement if is_pinned else None)
    if found is None:
        raise IntegrityError(what, "missing in the store", wanted=row.statement, found="nothing")
    for field, wanted, value in (
        ("size", row.size_bytes, len(found.envelope)),
        ("SHA-256", row.statement, found.digest),
    ):
        if wanted != value:
            raise IntegrityError(what, field, wanted=wanted, found=value)
    if row_of(found.statement, found.envelope) != row:
        raise IntegrityError(what, "the row that names it says something else")
    if release is not None and found.statement.release != release:
        raise IntegrityError(what, "another release", wanted=release, found=found.statement.release[:80])
    return found


def _read_statement(store: Store, artifact: str, pinned: str | None = None) -> Artifact | None:
    if not is_ulid(artifact):
        raise IntegrityError("artifact id", "not a ULID", wanted="26 characters", found=artifact[:40])
    envelope = store.get(statement_key(artifact), LIMITS.statement_bytes)
    if envelope is None:
        return None
    what, digest = f"statement of artifact {artifact}", sha256(envelope)
    if pinned is not None and digest != pinned:
        raise IntegrityError(what, "SHA-256", wanted=pinned, found=digest)
    verified = store.trust.verify(envelope, trust.STATEMENT_PAYLOAD_TYPE, what, is_pinned=pinned is not None)
    if digest in store.trust.policy.revoked:
        raise TrustError(f"{what}: revoked by the trust policy: {digest}", hint="build and publish it anew")
    statement = read_statement(verified.payload)
    if statement.artifact != artifact:
        raise IntegrityError("statement", "of another artifact", wanted=artifact, found=statement.artifact[:40])
    return Artifact(statement, verified.payload, envelope, digest, verified.status, verified.not_after)


def read_file_table(store: Store, statement: Statement) -> FileTable:
    """Returns the file table of a statement, checked against its digest, its packs and its totals.

    Raises:
        IntegrityError: missing, not the statement's bytes, or it does not fit the packs.
    """
    return _reread(lambda: _read_file_table(store, statement))


def _read_file_table(store: Store, statement: Statement) -> FileTable:
    from cachepipe.adapters.packs import open_blob

    data = store.get(pack_key(statement.artifact, statement.table.digest), statement.table.size_bytes)
    if data is None:
        raise IntegrityError("file table", "missing in the store", wanted=statement.table.digest, found="nothing")
    table = read_table(bytes(open_blob(data, statement.table)), statement.packs, len(statement.entries))
    wanted = (statement.root, statement.files, statement.unpacked_bytes)
    found = (table.root, len(table.files), table.unpacked_bytes)
    if found != wanted:
        raise IntegrityError("file table", "root, files and bytes", wanted=wanted, found=found)
    return table


# --- references: name@channel, name@channel:42, an artifact id, a prefix of a statement's digest ------------------------


def resolve_rows(store: Store, ref: str) -> tuple[IndexRow, ...]:
    """Returns the rows that a reference names: all targets of a channel, or one artifact.

    Raises:
        UsageError: not a reference, or a digest prefix that names several.
        MissError: nothing is published under it.
    """
    named = _REF.fullmatch(ref)
    if named is not None:
        name, channel, version = named.groups()
        if version is not None:
            return read_index_version(store, name, channel, int(version), None).index.rows
        found = newest(store, name, channel)
        if found is None:
            raise nothing_published(store, ref)
        return found.index.rows
    if is_ulid(ref):
        return (_row(_existing(store, ref)),)
    if _DIGEST_PREFIX.fullmatch(ref) is not None:
        return (_row(_by_digest(store, ref)),)
    raise UsageError(
        f"not a reference: {ref[:80]!r}",
        hint="use name@channel, name@channel:42, an artifact id, or 8 or more digits of a statement's digest",
    )


def resolve_ref(store: Store, ref: str) -> Artifact:
    """Returns the one artifact that a reference names.

    Raises:
        UsageError: as `resolve_rows`, or a channel with several targets.
        MissError: nothing is published under it.
        IntegrityError, TrustError, StoreError: as `read_artifact`.
    """
    rows = resolve_rows(store, ref)
    if not rows:
        raise nothing_published(store, ref)
    if len(rows) > 1:
        names = ", ".join(f"{row.artifact} ({row.device})" for row in rows)
        raise UsageError(f"{ref} has several targets: {names}", hint="name one by its artifact id")
    return read_artifact(store, rows[0])


def _row(artifact: Artifact) -> IndexRow:
    return row_of(artifact.statement, artifact.envelope)


def _existing(store: Store, artifact: str) -> Artifact:
    found = _read_statement(store, artifact)
    if found is None:
        raise MissError(f"no such artifact: {artifact} in {store.url}")
    return found


def _by_digest(store: Store, prefix: str) -> Artifact:
    found = set()
    for key in store.list("v1/artifacts/"):
        artifact = key.split("/")[2]
        if key == statement_key(artifact):
            envelope = store.get(key, LIMITS.statement_bytes)
            if envelope is not None and sha256(envelope).startswith(prefix):
                found.add(artifact)
    if len(found) != 1:
        what = (
            f"{len(found)} statements have the digest {prefix}…" if found else f"no statement has the digest {prefix}…"
        )
        raise UsageError(what, hint="give more digits") if found else MissError(f"{what} in {store.url}")
    return _existing(store, found.pop())
