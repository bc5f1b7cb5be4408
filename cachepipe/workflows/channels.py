"""What moves between channels: promote, rollback, revoke, renew, and the lock file that pins rows for an image.

Each writes a new index version; nothing is overwritten. An artifact that becomes current again is pinned while its
statement is looked at, so that gc cannot take it in between.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from cachepipe.adapters.store import Store
from cachepipe.domain.index import Index, IndexRow, advance, with_row
from cachepipe.domain.layout import check_name
from cachepipe.domain.lock import Lock, lock_bytes, lock_of
from cachepipe.errors import MissError, TrustError, UnsafePathError, UsageError
from cachepipe.workflows.fetch import newest, nothing_published, read_channel, read_index_version, resolve_rows
from cachepipe.workflows.publish import claim_format, commit_index, commit_rows, pinned, require_present


def promote(store: Store, name: str, source: str, target: str, ref: str | None, now: datetime) -> Index:
    """Returns the target channel's new index: its rows, those of the source's targets replaced.

    Args:
        store: where.
        name: of the release.
        source: channel that is copied from.
        target: channel that is copied to.
        ref: one artifact of the release instead of all targets of the source.
        now: time of the new version.

    Raises:
        MissError: the source or an artifact is not there (any more).
        TrustError: an artifact is revoked in either channel, something is not signed by trusted keys, or there is no index key.
        UsageError: source and target are the same, or the reference names no artifact of the release.
        IntegrityError, StoreError, ConflictError: as `publish`.
    """
    check_name(target, "the target channel")
    if source == target and ref is None:
        raise UsageError(f"source and target are the same channel: {source}")
    origin = _current(store, name, source) if ref is None or newest(store, name, source) else None
    rows = resolve_rows(store, ref) if ref is not None else origin.rows if origin else ()
    if not rows:
        raise nothing_published(store, f"{name}@{source}")
    if origin is not None:
        _refuse_revoked(rows, origin)

    def change(index: Index | None) -> tuple[IndexRow, ...]:
        merged = index.rows if index else ()
        if index is not None:
            _refuse_revoked(rows, index)
        for row in rows:
            merged = merged if row in merged else with_row(merged, row)
        return merged

    claim_format(store)
    with ExitStack() as stack:
        _pin_all(stack, store, rows, name)
        return commit_rows(store, name, target, change, now)


def rollback(store: Store, name: str, channel: str, to_version: int | None, now: datetime) -> Index:
    """Returns a new index version with the rows of an earlier one.

    Args:
        store: where.
        name: of the release.
        channel: of the release.
        to_version: whose rows; None: the newest version whose rows differ from the current ones.
        now: time of the new version.

    Raises:
        MissError: no such version, or one of its artifacts is gone.
        TrustError: one of its artifacts has been revoked since.
        UsageError: that version's rows are the current ones already.
        IntegrityError, StoreError, ConflictError: as `publish`.
    """
    current = _current(store, name, channel)
    earlier = _earlier(store, current, to_version)
    if earlier.rows == current.rows:
        raise UsageError(f"{name}@{channel}:{earlier.version} has the rows that are current already")

    def change(index: Index | None) -> tuple[IndexRow, ...]:
        _refuse_revoked(earlier.rows, index or current)
        return earlier.rows

    with ExitStack() as stack:
        _refuse_revoked(earlier.rows, current)
        _pin_all(stack, store, earlier.rows, name)
        return commit_rows(store, name, channel, change, now)


def renew(store: Store, name: str, channel: str, now: datetime) -> Index:
    """Returns a new index version with the current rows and a fresh expiry.

    Raises:
        MissError: nothing is published there.
        StoreError, ConflictError: as `publish`.
    """
    _current(store, name, channel)
    return commit_rows(store, name, channel, lambda index: index.rows if index else (), now)


def revoke(store: Store, name: str, channel: str, ref: str, now: datetime) -> Index:
    """Returns a new index version without the artifact, which says that its statement is refused from now on.

    Args:
        store: where.
        name: of the release.
        channel: of the release.
        ref: the artifact; a full statement digest is accepted even if its artifact is gone.
        now: time of the new version.

    Raises:
        MissError: nothing is published in the channel, or under the reference.
        UsageError: not a reference.
        StoreError, ConflictError: as `publish`.
    """
    current = _current(store, name, channel)
    in_channel = [row.statement for row in current.rows if ref in (row.artifact, row.statement)]
    is_full_digest = len(ref) == 64 and set(ref) <= set("0123456789abcdef")
    digests = in_channel or ([ref] if is_full_digest else [row.statement for row in resolve_rows(store, ref)])

    def edit(index: Index | None, nonce: str) -> Index:
        base = index or current
        revoked = tuple(sorted({*base.revoked, *digests}))
        rows = tuple(row for row in base.rows if row.statement not in revoked)
        return dataclasses.replace(advance(base, rows, now, nonce), revoked=revoked)

    return commit_index(store, name, channel, edit)


def write_lock(store: Store, name: str, channel: str, path: Path, now: datetime) -> Lock:
    """Returns the lock that pins a channel's current statements, after it was written whole to `path`.

    Raises:
        MissError, TrustError, IntegrityError, StoreError: as `read_channel` and `read_artifact`.
        UnsafePathError: the file cannot be written.
    """
    index = read_channel(store, name, channel, now).index
    rows = tuple(row for row in index.rows if row.statement not in index.revoked)
    roots = {require_present(store, row, name).statement.root for row in rows}
    if not rows:
        raise nothing_published(store, f"{name}@{channel}")
    # the root lets a restore see without the store that the artifact is there; targets may differ in it
    lock = lock_of(dataclasses.replace(index, rows=rows), roots.pop() if len(roots) == 1 else "")
    # A rename would put the file in the place of a link or, by root, of a device such as /dev/stdout.
    if path.exists() and not path.is_file():
        raise UnsafePathError(path, "not a regular file", hint="name a file that may be replaced")
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(lock_bytes(lock))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UnsafePathError(
            path, (error.strerror or str(error)).lower(), hint="name a file in a folder that you can write"
        ) from error
    return lock


def _current(store: Store, name: str, channel: str) -> Index:
    found = newest(store, name, channel)
    if found is None:
        raise nothing_published(store, f"{name}@{channel}")
    return found.index


def _earlier(store: Store, current: Index, to_version: int | None) -> Index:
    if to_version is not None:
        return read_index_version(store, current.name, current.channel, to_version, None).index
    for version in range(current.version - 1, 0, -1):
        index = read_index_version(store, current.name, current.channel, version, None).index
        if index.rows != current.rows:
            return index
    raise MissError(f"there is no earlier version with other rows: {current.name}@{current.channel}")


def _refuse_revoked(rows: Sequence[IndexRow], index: Index) -> None:
    revoked = [row.artifact for row in rows if row.statement in index.revoked]
    if revoked:
        raise TrustError(
            f"revoked in {index.name}@{index.channel}: {', '.join(revoked)}", hint="build and publish it anew"
        )


def _pin_all(stack: ExitStack, store: Store, rows: Sequence[IndexRow], release: str) -> None:
    for row in rows:
        stack.enter_context(pinned(store, row.artifact))
        require_present(store, row, release)
