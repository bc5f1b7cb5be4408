"""What moves between channels: promote, rollback, revoke, renew, and the lock file that pins rows for an image.

Each writes a new index version; nothing is overwritten. An artifact that becomes current again is pinned while its
statement is looked at, so that gc cannot take it in between.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cachepipe.adapters.store import Store
from cachepipe.domain.index import Index, IndexRow, advance, first_index, nothing_current, with_row
from cachepipe.domain.layout import INDEXES, place_of
from cachepipe.domain.lock import Lock, lock_bytes, lock_of
from cachepipe.domain.names import check_name
from cachepipe.errors import MissError, TrustError, UnsafePathError, UsageError
from cachepipe.workflows.fetch import (
    newest,
    nothing_published,
    read_artifact,
    read_channel,
    read_index_version,
    resolve_rows,
)
from cachepipe.workflows.publish import claim_format, commit_index, commit_rows, pinned, require_present


@dataclass(frozen=True)
class Promotion:
    index: Index
    """The target channel's."""
    is_new: bool
    """False: the channel had these rows already, and nothing was written."""


def promote(store: Store, name: str, source: str, target: str, ref: str | None, now: datetime) -> Promotion:
    """Returns the target channel's index with the source's rows, each in place of the one for the same target.

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
        UsageError: source and target are the same, or the reference is of another release.
        IntegrityError, StoreError, ConflictError: as `publish`.
    """
    check_name(target, "the target channel")
    if source == target and ref is None:
        raise UsageError(f"source and target are the same channel: {source}")
    origin = _current(store, name, source) if ref is None or newest(store, name, source) else None
    rows = rows_of_release(store, ref, name) if ref is not None else origin.rows if origin else ()
    if not rows:
        raise nothing_published(store, ref or f"{name}@{source}")
    if origin is not None:
        _refuse_revoked(rows, origin)

    claim_format(store)
    is_new = True
    with ExitStack() as stack:
        check_pins = _pin_all(stack, store, rows, name)

        def edit(index: Index | None, nonce: str) -> Index:
            nonlocal is_new
            check_pins()
            merged = index.rows if index else ()
            if index is not None:
                _refuse_revoked(rows, index)
            for row in rows:
                merged = merged if row in merged else with_row(merged, row)
            if index is None:
                return first_index(name, target, merged, now, nonce)
            is_new = merged != index.rows
            return advance(index, merged, now, nonce) if is_new else index

        return Promotion(commit_index(store, name, target, edit), is_new)


def rows_of_release(store: Store, ref: str, name: str) -> tuple[IndexRow, ...]:
    """Returns the rows that a reference names, which must be of the release.

    Raises:
        UsageError: of another release, or not a reference.
        MissError, IntegrityError, TrustError, StoreError: as `resolve_rows`.
    """
    other = ref.partition("@")[0] if "@" in ref else name
    rows = resolve_rows(store, ref) if other == name else ()
    if other == name and "@" not in ref:
        other = read_artifact(store, rows[0]).statement.release
    if other != name:
        raise UsageError(f"{ref[:80]} is of the release `{other[:64]}`, not `{name}`", hint=f"use --name {other[:64]}")
    return rows


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

    with ExitStack() as stack:
        _refuse_revoked(earlier.rows, current)
        check_pins = _pin_all(stack, store, earlier.rows, name)

        def change(index: Index | None) -> tuple[IndexRow, ...]:
            check_pins()
            _refuse_revoked(earlier.rows, index or current)
            return earlier.rows

        return commit_rows(store, name, channel, change, now)


def channels_of(store: Store, name: str) -> tuple[str, ...]:
    """Returns the channels of a release that have a version, sorted.

    Raises:
        UsageError: not a name.
        MissError: the release has none.
        StoreError: the store fails.
    """
    check_name(name, "the release name")
    places = (place_of(key) for key in store.list(f"{INDEXES}{name}/"))
    found = sorted({place.channel for place in places if place is not None and place.kind == "index"})
    if not found:
        raise nothing_published(store, name)
    return tuple(found)


def renew(store: Store, name: str, channel: str, now: datetime) -> Index:
    """Returns a new index version with the current rows and a fresh expiry.

    Raises:
        MissError: nothing is published there.
        StoreError, ConflictError: as `publish`.
    """
    _current(store, name, channel)
    return commit_rows(store, name, channel, lambda index: index.rows if index else (), now)


def revoke(store: Store, name: str, channel: str, ref: str, now: datetime) -> Index:
    """Returns the channel's index without the artifact, which says that its statement is refused from now on.

    It is a new version, or the current one if that refuses the artifact already.

    Args:
        store: where.
        name: of the release.
        channel: of the release.
        ref: the artifact, or a channel for all its targets; a full statement digest, and an artifact that the channel names, are
            accepted even if it is gone.
        now: time of the new version.

    Raises:
        MissError: nothing is published in the channel, or under the reference.
        UsageError: not a reference, or of another release.
        StoreError, ConflictError: as `publish`.
    """
    (index,) = _revoke_in(store, [_current(store, name, channel)], ref, now)
    return index


def revoke_everywhere(store: Store, name: str, ref: str, now: datetime) -> tuple[Index, ...]:
    """Returns the index of every channel of the release, each as `revoke` makes it; the artifact is looked up once for all.

    Raises:
        As `revoke`; channels before the one that fails have their new version, and running it again does the others.
    """
    return _revoke_in(store, [_current(store, name, channel) for channel in channels_of(store, name)], ref, now)


def _revoke_in(store: Store, current: Sequence[Index], ref: str, now: datetime) -> tuple[Index, ...]:
    rows = [row for index in current for row in index.rows]
    named = {row.statement for row in rows if ref in (row.artifact, row.statement)}
    if not named:
        is_full_digest = len(ref) == 64 and set(ref) <= set("0123456789abcdef")
        found = () if is_full_digest else rows_of_release(store, ref, current[0].name)
        named = {row.statement for row in found} or ({ref} if is_full_digest else set())
    if not named:
        raise nothing_published(store, ref)

    def edit(index: Index | None, nonce: str) -> Index:
        assert index is not None, "versions are never removed"
        if named <= set(index.revoked):
            return index
        kept = tuple(row for row in index.rows if row.statement not in named)
        return dataclasses.replace(advance(index, kept, now, nonce), revoked=tuple(sorted({*index.revoked, *named})))

    return tuple(commit_index(store, index.name, index.channel, edit) for index in current)


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
        raise nothing_current(f"{name}@{channel} in {store.url}", index.revoked)
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


def _pin_all(stack: ExitStack, store: Store, rows: Sequence[IndexRow], release: str) -> Callable[[], None]:
    """Pins artifacts that must be there, and returns what to call before an index that names them is claimed."""
    checks = []
    for row in rows:
        checks.append(stack.enter_context(pinned(store, row.artifact)))
        require_present(store, row, release)

    def check_pins() -> None:
        for check in checks:
            check()

    return check_pins
