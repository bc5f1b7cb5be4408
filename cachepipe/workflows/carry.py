"""Carries unchanged entries over from the channel's current artifact: the files that serve them, nothing else.

1 read the channel and the artifact for this machine
2 compare format, path, fingerprint and entry keys
3 (per entry) fetch and verify the packs that hold its files, write those files
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from cachepipe.adapters.materialise import materialise
from cachepipe.adapters.packs import open_blob
from cachepipe.adapters.store import Store
from cachepipe.adapters.workdir import EntryDir
from cachepipe.domain.artifact import Blob, FileTable, Segment
from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.layout import pack_key
from cachepipe.domain.record import Json
from cachepipe.errors import IntegrityError, MissError, TrustError
from cachepipe.workflows.assemble import Piece
from cachepipe.workflows.fetch import Artifact, read_artifact, read_channel
from cachepipe.workflows.plan import Plan, PlannedEntry

FETCH_LIMIT_S = 600.0


@dataclass(frozen=True)
class Earlier:
    """The artifact that the channel holds for this machine, and where each entry key stands in it."""

    artifact: Artifact
    numbers: Mapping[str, int]
    """Entry key → number of the entry in the statement."""

    def is_the_same_release(self, plan: Plan) -> bool:
        """Tells whether it covers exactly the plan's entries, by the same names and within the same tolerances."""
        wanted = {(entry.spec.id, entry.key, entry.spec.rtol, entry.spec.atol) for entry in plan.entries}
        held = {(row.spec.id, row.key, row.spec.rtol, row.spec.atol) for row in self.artifact.statement.entries}
        return wanted == held


def earlier_artifact(
    store: Store, plan: Plan, channel: str, fingerprints: tuple[Fingerprint, ...], now: datetime
) -> Earlier | None:
    """Returns the channel's artifact for this machine and path, None if there is none that may be carried over.

    Args:
        store: where.
        plan: of the release.
        channel: of the release.
        fingerprints: what an artifact built here now would have, with and without native code.
        now: an expired index is not used.
    """
    # 1
    try:
        index = read_channel(store, plan.name, channel, now).index
    except (MissError, TrustError):
        return None
    # 2
    wanted = {fingerprint.digest for fingerprint in fingerprints}
    for row in reversed(index.rows):
        is_mine = row.device == plan.device and Fingerprint(row.fingerprint).digest in wanted
        if not is_mine or row.statement in (*index.revoked, *store.trust.policy.revoked):
            continue
        artifact = read_artifact(store, row, plan.name)
        if artifact.statement.root == plan.root:
            return Earlier(artifact, {record.key: number for number, record in enumerate(artifact.statement.entries)})
    return None


def carried_piece(store: Store, earlier: Earlier, planned: PlannedEntry, entry: EntryDir, table: FileTable) -> Piece:
    """Returns an entry with the files and facts of the earlier artifact.

    Raises:
        IntegrityError, StoreError: the store does not give what the statement says.
    """
    # 3
    try:
        return _carried(store, earlier, planned, entry, table)
    except IntegrityError as error:
        error.hint = "the store's copy is damaged: build with `--fresh`, which takes nothing from it"
        raise


def _carried(store: Store, earlier: Earlier, planned: PlannedEntry, entry: EntryDir, table: FileTable) -> Piece:
    statement = earlier.artifact.statement
    number = earlier.numbers[planned.key]
    record = statement.entries[number]
    packs, part = part_of_table(statement.packs, table, number)
    target = entry.tree("carried")
    entry.drop_tree("carried")
    target.mkdir(mode=0o700)

    def fetch(digest: str) -> bytes:
        return _fetch(store, statement.artifact, next(pack for pack in packs if pack.digest == digest))

    if part.files:
        materialise(fetch, packs, part, target, statement.root, deadline=time.monotonic() + FETCH_LIMIT_S)
    explain = read_explain(store, earlier.artifact).get(record.spec.id, {})
    return Piece(planned, target, replace(record, spec=planned.spec), explain, entry, (), is_carried=True)


def part_of_table(packs: tuple[Blob, ...], table: FileTable, number: int) -> tuple[tuple[Blob, ...], FileTable]:
    """Returns the packs that hold the files of one entry, and the table of those files alone, its packs renumbered."""
    rows = [row for row in table.files if number in row.entries]
    used = sorted({segment.pack for row in rows for segment in row.segments})
    places = {old: new for new, old in enumerate(used)}
    moved = tuple(
        row._replace(segments=tuple(Segment(places[cut.pack], cut.offset, cut.length) for cut in row.segments))
        for row in rows
    )
    return tuple(packs[old] for old in used), FileTable(table.root, moved)


def read_explain(store: Store, artifact: Artifact) -> Mapping[str, Json]:
    """Returns the explain data of an artifact: entry id → components, settings, lookups.

    Raises:
        IntegrityError: missing, or not the statement's bytes.
    """
    blob = artifact.statement.explain
    tree = json.loads(bytes(open_blob(_fetch(store, artifact.statement.artifact, blob), blob)))
    return tree if isinstance(tree, dict) else {}


def _fetch(store: Store, artifact: str, blob: Blob) -> bytes:
    data = store.get(pack_key(artifact, blob.digest), blob.size_bytes)
    if data is None:
        raise IntegrityError(f"pack {blob.digest[:12]}", "missing in the store", wanted=blob.digest, found="nothing")
    return data
