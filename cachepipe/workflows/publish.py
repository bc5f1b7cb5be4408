"""Putting an artifact into a store so that a crash at any instant leaves the last good version restorable.

1 pin the artifact (gc leaves it alone), by the same write prove that the store honours conditions; wait until gc is off it
2 packs, table, explain data: created only if absent
3 signed statement: makes the artifact exist
4 read it back as a restore would
5 signed index version N+1: claimed by name; a refused claim is judged by reading back its nonce (without an index key: none)
6 hint
7 unpin
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from cachepipe.adapters.store import Store
from cachepipe.domain import trust
from cachepipe.domain.artifact import Blob
from cachepipe.domain.collect import FLOORS
from cachepipe.domain.index import PAYLOAD_TYPE, Index, IndexRow, advance, first_index, index_bytes, with_row
from cachepipe.domain.layout import (
    FORMAT_BYTES,
    FORMAT_KEY,
    hint_key,
    index_key,
    pack_key,
    pin_key,
    statement_key,
    tomb_prefix,
)
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.names import check_name
from cachepipe.domain.policy import INDEX
from cachepipe.domain.record import canonical_bytes, sha256
from cachepipe.domain.statement import Statement, statement_bytes
from cachepipe.domain.ulid import is_ulid, ulid
from cachepipe.errors import ConflictError, IntegrityError, MissError, StoreError, TrustError, UsageError
from cachepipe.failpoints import reached
from cachepipe.workflows.fetch import Artifact, check_format, newest, read_artifact, read_file_table, row_of

DEADLINE_S = 120.0
"""How long a publisher tries to claim the next index version; the statement stays valid after it."""

WRITERS = 8
"""Measured on loopback: more do not help two cores."""

TOMB_WAIT_S = 60.0
"""How long a publisher waits for gc to leave an artifact: many times what the removal of a batch takes."""

Change: TypeAlias = Callable[["Index | None"], tuple[IndexRow, ...]]
"""(current index, None for a new channel) → rows of the next version; called again when another publisher was faster."""

Edit: TypeAlias = Callable[["Index | None", str], Index]
"""(current index, nonce) → the next version; the current index itself: there is nothing to change."""


@dataclass(frozen=True)
class PackedArtifact:
    statement: Statement
    blobs: Path
    """A folder with the packs, the table and the explain data, each named by its digest."""


def publish(
    store: Store, name: str, channel: str, packed: PackedArtifact, now: datetime, *, single_writer: bool = False
) -> IndexRow:
    """Returns the row under which the artifact is now current in the channel; publishing it again changes nothing.

    Whoever has the statement key alone publishes the statement, and no channel names it yet.

    Args:
        store: where to.
        name: of the release; the statement's own.
        channel: of the release; other targets in it stay.
        packed: what `build` made and proved.
        now: time of the index version.
        single_writer: the operator vouches that nobody else publishes; a store that ignores conditions is accepted.

    Raises:
        UsageError: the names are not the statement's, or cannot be names.
        StoreError, NoRoomError: the store fails, is full, or ignores conditions.
        IntegrityError: a blob or what was read back is not what the statement says.
        TrustError: there is no key to sign with, what is published is not signed by trusted keys, or the artifact is revoked in this channel.
        ConflictError: other publishers won until the deadline.
    """
    statement = packed.statement
    if statement.release != check_name(name, "the release name"):
        raise UsageError(f"the artifact is of release `{statement.release}`, not `{name}`")
    check_name(channel, "the channel")
    if not is_ulid(statement.artifact):
        raise UsageError(f"the artifact's id is not a ULID: {statement.artifact[:40]!r}")
    claim_format(store)
    with pinned(store, statement.artifact, single_writer) as check_pin:  # 1, 7
        _put_blobs(store, packed)  # 2
        envelope = _put_statement(store, statement)  # 3
        row = _read_back(store, statement, envelope)  # 4
        if not store.trust.can_sign(INDEX):
            return row

        def change(index: Index | None) -> tuple[IndexRow, ...]:
            check_pin()
            return _with_new_row(index, row)

        commit_rows(store, name, channel, change, now)  # 5, 6
    return row


def rehearse(store: Store, name: str, channel: str, now: datetime) -> None:
    """Fails as `publish` would for want of rights, keys or trust, before the work of hours is done; only the format stays.

    Args:
        store: where to.
        name: of the release.
        channel: of the release.
        now: time of the publication.

    Raises:
        StoreError, NoRoomError: the store cannot be written, or ignores conditions.
        UsageError, TrustError: there is no key to sign with, it is not believed, or the channel's newest version is not.
    """
    claim_format(store)
    names_it = store.trust.can_sign(INDEX)
    for payload_type in (trust.STATEMENT_PAYLOAD_TYPE, *((PAYLOAD_TYPE,) if names_it else ())):
        store.trust.rehearse(payload_type)
    if names_it:
        try:
            newest(store, name, channel)
        except TrustError as error:
            error.hint = (
                "no version can follow one that is not believed here: publish to another store or channel, "
                "or by a policy that lists the key"
            )
            raise
    with pinned(store, ulid(now, os.urandom(10))):
        pass


def claim_format(store: Store) -> None:
    """Writes the store's format once, or checks the one that is there.

    Raises:
        StoreError: the store has a format of another release.
    """
    if not check_format(store):
        store.put_if_absent(FORMAT_KEY, FORMAT_BYTES)
        check_format(store)
    reached("publish.after_format")


@contextmanager
def pinned(store: Store, artifact: str, single_writer: bool = False) -> Iterator[Callable[[], None]]:
    """Announces that an artifact is in use while the body runs, and proves that the store honours conditions.

    Gives a function to call right before an index version is claimed: it raises ConflictError when the pin is so old that gc
    may soon take it for a crash's.

    Raises:
        StoreError: a second creation of the pin succeeded, so two publishers could overwrite each other.
        ConflictError: gc is removing the artifact.
    """
    key = pin_key(artifact, os.urandom(16).hex())
    first, second = (canonical_bytes({"attempt": attempt, "artifact": artifact}) for attempt in (1, 2))
    began = time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while a laptop sleeps

    def check_pin() -> None:
        if time.clock_gettime(time.CLOCK_BOOTTIME) - began > FLOORS.pin_s / 2:
            raise ConflictError(f"this took more than {FLOORS.pin_s / 7200:.0f} hours: {artifact}")

    store.put_if_absent(key, first)
    try:
        is_created_twice = store.put_if_absent(key, second) or store.get(key, LIMITS.small_file_bytes) != first
        if is_created_twice and not single_writer:
            raise StoreError(
                f"the store ignores conditions, two publishers could overwrite each other: {store.url}",
                hint="use a store with conditional writes (S3's `If-None-Match`)",
            )
        reached("publish.after_pin")
        _await_no_tomb(store, artifact)
        yield check_pin
    finally:
        try:
            store.delete(key)
        except StoreError:
            pass  # a pin that stays only delays gc by a day; the result of the body counts


def _await_no_tomb(store: Store, artifact: str) -> None:
    """Returns when gc is not at work on a pinned artifact: it was not, it gave way to the pin, or it has removed everything."""
    give_up = time.monotonic() + TOMB_WAIT_S
    while any(tomb.age_s < FLOORS.tomb_s for tomb in store.list_objects(tomb_prefix(artifact))):
        if time.monotonic() > give_up:
            raise ConflictError(
                f"gc is removing the artifact: {artifact} in {store.url}",
                hint=f"run the command again; if no gc is running, one was killed: its announcement counts for "
                f"{FLOORS.tomb_s / 60:.0f} minutes",
            )
        time.sleep(random.uniform(0.01, 0.2))


def _put_blobs(store: Store, packed: PackedArtifact) -> None:
    """Writes all blobs, `WRITERS` at a time: one request takes as long as the network's way, whatever the store can do."""
    statement = packed.statement
    blobs = (*statement.packs, statement.table, statement.explain)

    def put(blob: Blob) -> None:
        _put_blob(store, statement.artifact, packed.blobs / blob.digest, blob)

    put(blobs[0])
    reached("publish.after_first_pack")
    with ThreadPoolExecutor(WRITERS, "put") as pool:
        for _ in pool.map(put, blobs[1:]):  # raises what a writer raised
            pass
    reached("publish.after_packs")


def _put_blob(store: Store, artifact: str, path: Path, blob: Blob) -> None:
    key = pack_key(artifact, blob.digest)
    put_same(store, key, _read_blob(path, blob))
    found = store.head(key)
    wanted = (blob.size_bytes, blob.digest)
    if found is None or (found.size_bytes, found.sha256 or blob.digest) != wanted:
        stored = (found.size_bytes, found.sha256) if found else "nothing"
        raise IntegrityError(f"object {key}", "size and SHA-256 in the store", wanted=wanted, found=stored)


def _read_blob(path: Path, blob: Blob) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"blob {path}", (error.strerror or "unreadable").lower()) from error
    found = (len(data), sha256(data))
    if found != (blob.size_bytes, blob.digest):
        raise IntegrityError(f"blob {path}", "size and SHA-256", wanted=(blob.size_bytes, blob.digest), found=found)
    return data


def put_same(store: Store, key: str, data: bytes) -> None:
    """Makes `key` hold `data`; an earlier try of the same bytes is as good as this one.

    Raises:
        IntegrityError: other bytes are there.
        StoreError, NoRoomError: the store fails or is full.
    """
    if store.put_if_absent(key, data):
        return
    there = store.get(key, max(len(data), 1))
    if there is None:
        raise StoreError(f"the store says that `{key}` is there, and has nothing there: {store.url}", kind="conflict")
    if there != data:
        raise IntegrityError(
            f"object {key}", "already there with other bytes", wanted=sha256(data), found=sha256(there)
        )


def _put_statement(store: Store, statement: Statement) -> bytes:
    """Signs and writes the statement. ECDSA signs differently each time: one that is there already keeps its signature."""
    payload, key = statement_bytes(statement), statement_key(statement.artifact)
    there = store.get(key, LIMITS.statement_bytes)
    if there is not None:
        verified = store.trust.verify(
            there, trust.STATEMENT_PAYLOAD_TYPE, f"statement of artifact {statement.artifact}"
        )
        if verified.payload != payload:
            raise IntegrityError(
                f"object {key}",
                "already there with other bytes",
                wanted=sha256(payload),
                found=sha256(verified.payload),
            )
        return there
    envelope = store.trust.seal(payload, trust.STATEMENT_PAYLOAD_TYPE)
    if len(envelope) > LIMITS.statement_bytes:
        raise IntegrityError("statement", "too long", wanted=f"<= {LIMITS.statement_bytes} bytes", found=len(envelope))
    put_same(store, key, envelope)
    reached("publish.after_statement")
    return envelope


def _read_back(store: Store, statement: Statement, envelope: bytes) -> IndexRow:
    row = row_of(statement, envelope)
    artifact = read_artifact(store, row, statement.release)
    read_file_table(store, artifact.statement)
    reached("publish.after_read_back")
    return row


def _with_new_row(index: Index | None, row: IndexRow) -> tuple[IndexRow, ...]:
    if index is None:
        return (row,)
    if row.statement in index.revoked:
        raise TrustError(f"revoked in {index.name}@{index.channel}: {row.statement}", hint="build it anew")
    return index.rows if row in index.rows else with_row(index.rows, row)


def commit_rows(store: Store, name: str, channel: str, change: Change, now: datetime) -> Index:
    """Returns the index that now holds the rows that `change` made from the current one; none of other publishers' is lost.

    Raises:
        ConflictError: other publishers won until the deadline.
        StoreError: the store fails.
        Whatever `change` raises.
    """

    def edit(index: Index | None, nonce: str) -> Index:
        rows = change(index)
        return first_index(name, channel, rows, now, nonce) if index is None else advance(index, rows, now, nonce)

    return commit_index(store, name, channel, edit)


def commit_index(store: Store, name: str, channel: str, edit: Edit, deadline_s: float | None = None) -> Index:
    """Returns the index version that was made by `edit` from the newest one and claimed by its name.

    The newest one itself is returned, and nothing is written, if `edit` does.

    Raises:
        ConflictError: other publishers won until `deadline_s`; None: `DEADLINE_S`.
        IntegrityError: the new index is longer than an index may be.
        StoreError: the store fails.
    """
    deadline_s = DEADLINE_S if deadline_s is None else deadline_s
    give_up = time.monotonic() + deadline_s
    tries = 0
    check_format(store)
    while True:
        current = newest(store, name, channel)
        index = edit(current.index if current else None, os.urandom(16).hex())
        if current is not None and index is current.index:
            return index
        if _claim(store, index):
            reached("publish.after_index")
            store.put_hint(hint_key(name, channel), b"%d\n" % index.version)
            reached("publish.after_hint")
            return index
        tries += 1
        if time.monotonic() > give_up:
            raise ConflictError(f"{name}@{channel}: other publishers won {tries} times in {deadline_s:.0f} s")
        time.sleep(random.uniform(0, min(1.0, 0.01 * 2 ** min(tries, 7))))


def _claim(store: Store, index: Index) -> bool:
    """Tells whether this very index is now the version of its number."""
    key = index_key(index.name, index.channel, index.version)
    envelope = store.trust.seal(index_bytes(index), PAYLOAD_TYPE)
    if len(envelope) > LIMITS.index_bytes:
        raise IntegrityError("index", "too long", wanted=f"<= {LIMITS.index_bytes} bytes", found=len(envelope))
    try:
        if store.put_if_absent(key, envelope):
            return True
    except StoreError:
        # The write may have landed and only its answer been lost: look before giving up.
        if store.get(key, LIMITS.index_bytes) is None:
            raise
    return store.get(key, LIMITS.index_bytes) == envelope  # the nonce makes equal bytes ours


def require_present(store: Store, row: IndexRow, release: str) -> Artifact:
    """Returns the artifact of a row, which must still be there; call it with the artifact pinned.

    Raises:
        MissError: its statement or one of its packs is missing.
        IntegrityError, TrustError: its statement is not the row's.
    """
    if store.get(statement_key(row.artifact), LIMITS.statement_bytes) is None:
        raise MissError(f"the artifact is gone: {row.artifact} in {store.url}", hint="build and publish it again")
    artifact = read_artifact(store, row, release)
    if lost := missing_objects(store, artifact.statement):
        raise MissError(
            f"the artifact is incomplete: {row.artifact} lost {lost} objects in {store.url}",
            hint="build and publish it again",
        )
    return artifact


def missing_objects(store: Store, statement: Statement) -> int:
    """Returns how many packs, tables and explain data the store has lost; whoever fetches them looks at their bytes."""
    wanted = {
        pack_key(statement.artifact, blob.digest) for blob in (*statement.packs, statement.table, statement.explain)
    }
    return len(wanted.difference(store.list(f"v1/artifacts/{statement.artifact}/packs/")))
