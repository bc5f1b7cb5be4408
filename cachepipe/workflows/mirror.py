"""copy: taking releases from one store to another, byte for byte, so that what was signed stays signed.

1 see what is named: channels with their history, artifacts, lock files
2 pin each artifact in the target, as its publisher does
3 packs, table, explain data, checked against the statement on their way; then the statement
4 index versions from the newest down: readers of the target see the old end of the channel until the last one closes the gap
5 hint
6 unpin

What is there already is not fetched again, so a run that was stopped goes on where it was. A channel is copied only into one
that has the very same history so far: its versions are signed with their numbers and cannot be renumbered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

from cachepipe.adapters.store import Store
from cachepipe.domain.artifact import Blob
from cachepipe.domain.index import Index, IndexRow
from cachepipe.domain.layout import (
    ARTIFACTS,
    INDEXES,
    hint_key,
    index_key,
    index_prefix,
    pack_key,
    place_of,
    statement_key,
)
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.lock import Lock
from cachepipe.domain.record import sha256
from cachepipe.errors import ConflictError, IntegrityError, MissError, StoreError
from cachepipe.failpoints import reached
from cachepipe.workflows.fetch import (
    check_format,
    index_as_it_is,
    newest,
    nothing_published,
    read_artifact,
    resolve_rows,
)
from cachepipe.workflows.publish import claim_format, missing_objects, pinned, put_same

FAIL_POINTS = (
    "copy.after_pack",
    "copy.after_statement",
    "copy.after_first_index",
    "copy.after_indexes",
    "copy.after_hint",
)
WORKERS = 8
"""Packs in flight: 8 MiB each, as many as a publisher sends."""


@dataclass(frozen=True)
class CopiedArtifact:
    artifact: str
    release: str
    objects: int
    """Written by this run; 0: everything was there."""
    size_bytes: int


@dataclass(frozen=True)
class CopiedChannel:
    name: str
    channel: str
    version: int
    """The newest, which is now the target's newest."""
    versions: int
    """Written by this run."""


@dataclass(frozen=True)
class Copy:
    source: str
    target: str
    artifacts: tuple[CopiedArtifact, ...]
    channels: tuple[CopiedChannel, ...]


Say = Callable[[str], None]


def copy(source: Store, target: Store, refs: Sequence[str], locks: Sequence[Lock], say: Say = lambda _: None) -> Copy:
    """Returns what was copied: everything that is named is then in the target, with the bytes it has in the source.

    Args:
        source: is only read.
        target: store to copy to; it needs the rights of a publisher, no key.
        refs: `name@channel` copies the channel's current artifacts and its index versions; any other reference copies artifacts.
        locks: their artifacts are copied. Neither references nor locks: every channel.
        say: gets one line per artifact and channel.

    Raises:
        MissError: nothing is published under a reference, or gc of the source removed it meanwhile.
        ConflictError: a channel of the target has another history.
        IntegrityError: bytes in the source are not what the statement says; or other bytes are in the target.
        UsageError, TrustError, StoreError, NoRoomError: as `publish`.
    """
    if not check_format(source):
        raise MissError(f"there is no store at {source.url}", hint="look whether the address is right and mounted")
    channels = _channels(source, refs, locks)  # 1
    rows = [row for lock in locks for row in lock.rows]
    rows += [row for ref in refs if not _is_channel(ref) for row in resolve_rows(source, ref)]
    claim_format(target)
    target.trust.adopt(source.trust)
    artifacts: dict[str, CopiedArtifact] = {}
    for row in rows:
        with pinned(target, row.artifact):
            _note(artifacts, _copy_artifact(source, target, row, None, say))
    copied = []
    for index in channels:
        _check_history(source, target, index)
        current = [row for row in index.rows if row.statement not in index.revoked]
        with ExitStack() as stack:
            for row in current:
                stack.enter_context(pinned(target, row.artifact))  # 2, 6
            for row in current:
                _note(artifacts, _copy_artifact(source, target, row, index.name, say))  # 3
            copied.append(_copy_channel(source, target, index, say))  # 4, 5
    return Copy(source.url, target.url, tuple(artifacts.values()), tuple(copied))


def _is_channel(ref: str) -> bool:
    return "@" in ref and ":" not in ref


def _channels(source: Store, refs: Sequence[str], locks: Sequence[Lock]) -> list[Index]:
    """Returns the newest index of each channel that is to be copied."""
    named = [ref.partition("@")[::2] for ref in refs if _is_channel(ref)]
    if not refs and not locks:
        places = (place_of(key) for key in source.list(INDEXES))
        named = sorted({(place.name, place.channel) for place in places if place is not None and place.kind == "index"})
        if not named:
            raise MissError(f"nothing is published: {source.url}")
    found = []
    for name, channel in named:
        current = newest(source, name, channel)
        if current is None:
            raise nothing_published(source, f"{name}@{channel}")
        found.append(current.index)
    return found


def _note(artifacts: dict[str, CopiedArtifact], copied: CopiedArtifact) -> None:
    """Adds up what was written: several channels may name an artifact."""
    before = artifacts.get(copied.artifact)
    if before is not None:
        copied = replace(
            copied, objects=before.objects + copied.objects, size_bytes=before.size_bytes + copied.size_bytes
        )
    artifacts[copied.artifact] = copied


def _copy_artifact(source: Store, target: Store, row: IndexRow, release: str | None, say: Say) -> CopiedArtifact:
    artifact = read_artifact(source, row, release)
    statement, key = artifact.statement, statement_key(row.artifact)
    there = {found.key: found.size_bytes for found in target.list_objects(f"{ARTIFACTS}{row.artifact}/")}
    blobs = {blob.digest: blob for blob in (*statement.packs, statement.table, statement.explain)}
    missing = [blob for blob in blobs.values() if there.get(pack_key(row.artifact, blob.digest)) != blob.size_bytes]
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="copy") as pool:
        for _ in pool.map(lambda blob: _copy_blob(source, target, row.artifact, blob), missing):
            reached("copy.after_pack")
    put_same(target, key, artifact.envelope)
    reached("copy.after_statement")
    if lost := missing_objects(
        target, statement
    ):  # who signed it was asked of the source; the target's keys may be others
        raise StoreError(f"{lost} objects that were just written are not there: {row.artifact} in {target.url}")
    size_bytes = sum(blob.size_bytes for blob in missing) + (0 if key in there else len(artifact.envelope))
    objects = len(missing) + (key not in there)
    if objects:
        say(f"{row.artifact} of {statement.release}: {objects} objects, {size_bytes} bytes")
    return CopiedArtifact(row.artifact, statement.release, objects, size_bytes)


def _copy_blob(source: Store, target: Store, artifact: str, blob: Blob) -> None:
    key = pack_key(artifact, blob.digest)
    data = source.get(key, blob.size_bytes)
    if data is None:
        raise MissError(
            f"the artifact is incomplete: {artifact} in {source.url}",
            hint="if gc removed it meanwhile, run the command again; else build and publish it again",
        )
    if (len(data), sha256(data)) != (blob.size_bytes, blob.digest):
        raise IntegrityError(f"object {key}", "size and SHA-256", wanted=blob.digest, found=sha256(data))
    put_same(target, key, data)


def _present_versions(store: Store, index: Index) -> set[int]:
    places = (place_of(key) for key in store.list(index_prefix(index.name, index.channel)))
    return {place.version for place in places if place is not None and place.kind == "index"}


def _check_history(source: Store, target: Store, index: Index) -> None:
    """Refuses a target whose channel has gone its own way, before anything is written."""
    there = _present_versions(target, index)
    if not there:
        return
    last = max(there)
    if last <= index.version:
        key = index_key(index.name, index.channel, last)
        if source.get(key, LIMITS.index_bytes) == target.get(key, LIMITS.index_bytes):
            return
    raise _other_history(source, target, index, last)


def _other_history(source: Store, target: Store, index: Index, version: int) -> ConflictError:
    return ConflictError(
        f"{index.name}@{index.channel} has a history of its own in {target.url}: version {version} is not that of {source.url}",
        hint="copy the artifacts alone (name them by id), and promote them there",
    )


def _copy_channel(source: Store, target: Store, index: Index, say: Say) -> CopiedChannel:
    name, channel = index.name, index.channel
    there = _present_versions(target, index)
    missing = [version for version in range(index.version, 0, -1) if version not in there]
    for version in missing:
        key = index_key(name, channel, version)
        envelope, _ = index_as_it_is(source, name, channel, version)
        if not target.put_if_absent(key, envelope) and target.get(key, LIMITS.index_bytes) != envelope:
            raise _other_history(source, target, index, version)
        if version == index.version:
            reached("copy.after_first_index")
    reached("copy.after_indexes")
    hint = target.get(hint_key(name, channel), LIMITS.small_file_bytes)
    if missing or hint != b"%d\n" % index.version:
        target.put_hint(hint_key(name, channel), b"%d\n" % index.version)
    reached("copy.after_hint")
    say(f"{name}@{channel}:{index.version}: {len(missing)} versions")
    return CopiedChannel(name, channel, index.version, len(missing))
