"""fsck: whether a store holds what its indexes and statements promise.

1 list the store: indexes first, so that what is published meanwhile is not taken for a loss
2 every index version: is the one that its name says, in a history without gaps; the hint is not ahead
3 every statement: read strictly; its packs, table and explain data are there, with their sizes
4 deep: every byte of them against its digest, and every frame and table read as a restore reads it
5 every row of an index: names this statement; a current one is there
6 what is none of ours, unfinished, or left by a crash: noted
7 what the audit of the signing keys found (workflows/audit.py), where one was asked for

A *problem* breaks a promise; a *note* is for a person to know. What an old index version names may have been removed by gc.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import NamedTuple

from cachepipe.adapters.packs import open_blob
from cachepipe.adapters.store import Store, StoredObject
from cachepipe.domain.artifact import Blob
from cachepipe.domain.collect import (
    CURRENT,
    FLOORS,
    Held,
    Inventory,
    Seen,
    protecting_versions,
    stale_announcements,
    take_inventory,
)
from cachepipe.domain.finding import Finding
from cachepipe.domain.index import Index, IndexRow, parse_timestamp
from cachepipe.domain.layout import ARTIFACTS, INDEXES, hint_key, pack_key, statement_key
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.printable import printable
from cachepipe.domain.statement import Statement
from cachepipe.errors import IntegrityError, MissError, TrustError
from cachepipe.workflows.audit import Audit, KeyCount
from cachepipe.workflows.fetch import (
    check_format,
    read_file_table,
    read_index_version,
    resolve_ref,
    row_of,
)

WORKERS = 8
"""Artifacts in flight: on S3 a check waits for round trips, not for this machine."""


@dataclass(frozen=True)
class Health:
    store: str
    is_deep: bool
    channels: int
    versions: int
    artifacts: int
    """With a statement."""
    objects: int
    """Of all artifacts; with `is_deep` each was read."""
    size_bytes: int
    findings: tuple[Finding, ...]
    keys: tuple[KeyCount, ...] = ()
    """Signing keys that were compared with their log."""

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_problem)


class _Known(NamedTuple):
    """What is kept of an artifact: thousands of statements are too much to hold."""

    row: IndexRow
    release: str


@dataclass
class _Check:
    store: Store
    is_deep: bool
    now: datetime
    findings: list[Finding] = field(default_factory=list)

    def problem(self, where: str, what: str) -> None:
        self.findings.append(Finding(True, where, what))

    def note(self, where: str, what: str) -> None:
        self.findings.append(Finding(False, where, what))


def fsck(store: Store, now: datetime, *, is_deep: bool = False, audit: Audit | None = None) -> Health:
    """Returns everything that is wrong with a store; nothing is written.

    Args:
        store: where.
        now: to tell indexes that have expired.
        is_deep: read every byte of every artifact.
        audit: of the same store.

    Raises:
        MissError: there is no store.
        StoreError: the store fails, or has another format.
    """
    has_format = check_format(store)
    objects = list(_objects(store))  # 1
    if not objects:
        raise MissError(f"there is no store at {store.url}", hint="look whether the address is right and mounted")
    check = _Check(store, is_deep, now)
    if not has_format:
        check.problem("v1/format.json", "missing: the next publisher writes it")
    inventory = take_inventory(objects)
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="fsck") as pool:
        indexes = _check_indexes(check, inventory, pool)  # 2
        artifacts = _check_artifacts(check, inventory, pool)  # 3, 4
    gone: dict[str, list[int]] = {}
    for index, counts in indexes:
        if _check_rows(check, index, counts, artifacts):  # 5
            gone.setdefault(f"{index.name}@{index.channel}", []).append(index.version)
    for channel, versions in gone.items():
        shown = ", ".join(map(str, versions))
        check.note(
            channel, f"a rollback to these versions is refused, since they name artifacts that are not here: {shown}"
        )
    _note_the_rest(check, inventory)  # 6
    check.findings += audit.findings if audit else ()  # 7
    content = [found for held in inventory.artifacts.values() for found in held.content]
    return Health(
        store=store.url,
        is_deep=is_deep,
        channels=len(inventory.indexes),
        versions=sum(map(len, inventory.indexes.values())),
        artifacts=len(artifacts),
        objects=len(content),
        size_bytes=sum(found.size_bytes for found in content),
        findings=tuple(sorted(check.findings, key=lambda found: (not found.is_problem, found.where, found.what))),
        keys=audit.keys if audit else (),
    )


def _objects(store: Store) -> Iterator[StoredObject]:
    yield from store.list_objects(INDEXES)
    yield from (found for found in store.list_objects("v1/") if not found.key.startswith(INDEXES))


def _check_indexes(check: _Check, inventory: Inventory, pool: ThreadPoolExecutor) -> list[tuple[Index, str]]:
    """Returns every index that can be read, and why gc keeps what it names; empty: gc may have removed it."""
    places: list[tuple[str, str, int, str]] = []
    for (name, channel), versions in sorted(inventory.indexes.items()):
        newest = max(versions)
        gaps = newest - len(versions)
        if gaps:
            first = islice((version for version in range(1, newest) if version not in versions), 8)
            shown = ", ".join(map(str, first)) + (", …" if gaps > 8 else "")
            check.problem(f"{name}@{channel}", f"{gaps} of {newest} versions are missing: {shown}")
        counting = protecting_versions({version: found.age_s for version, found in versions.items()})
        places += [(name, channel, version, counting.get(version, "")) for version in sorted(versions)]
        _check_hint(check, name, channel, newest)

    def read(place: tuple[str, str, int, str]) -> tuple[Index, str] | None:
        name, channel, version, counts = place
        try:
            index = read_index_version(check.store, name, channel, version, None).index
            parse_timestamp(index.expires_at, f"index {name}@{channel}:{version}")
            return index, counts
        except TrustError as error:
            # whoever signed an old version may have been replaced since; readers see the current one alone
            (check.problem if counts == CURRENT else check.note)(f"{name}@{channel}:{version}", str(error))
        except (IntegrityError, MissError) as error:
            check.problem(f"{name}@{channel}:{version}", str(error))
        return None

    return [found for found in pool.map(read, places) if found is not None]


def _check_hint(check: _Check, name: str, channel: str, newest: int) -> None:
    key = hint_key(name, channel)
    try:
        text = (check.store.get(key, LIMITS.small_file_bytes) or b"").strip()
    except IntegrityError as error:
        check.note(key, f"{error}: readers go without it")
        return
    if not text:
        check.note(key, "missing: readers go without it, the next publisher writes it")
    elif not text.isdigit():
        check.note(key, "not a number: readers go without it")
    elif int(text) > newest:
        check.note(key, f"ahead of the newest version {newest}: readers go without it")


def _check_artifacts(check: _Check, inventory: Inventory, pool: ThreadPoolExecutor) -> Mapping[str, _Known]:
    """Returns artifact → its row and release, of every artifact whose statement can be read."""

    def read(item: tuple[str, Held]) -> tuple[str, _Known] | None:
        name, held = item
        try:
            artifact = resolve_ref(check.store, name)
        except (IntegrityError, TrustError, MissError) as error:
            check.problem(statement_key(name), str(error))
            return None
        whole = _check_sizes(check, held, artifact.statement)
        if check.is_deep:
            _check_bytes(check, artifact.statement, whole)
        return name, _Known(row_of(artifact.statement, artifact.envelope), artifact.statement.release)

    published = [(name, held) for name, held in sorted(inventory.artifacts.items()) if held.statement is not None]
    return dict(found for found in pool.map(read, published) if found is not None)


def _blobs(statement: Statement) -> list[Blob]:
    return list({blob.digest: blob for blob in (*statement.packs, statement.table, statement.explain)}.values())


def _check_sizes(check: _Check, held: Held, statement: Statement) -> list[Blob]:
    """Returns the blobs that are there with their sizes."""
    sizes = {pack.key: pack.size_bytes for pack in held.packs}
    whole = []
    blobs = _blobs(statement)
    for blob in blobs:
        key = pack_key(statement.artifact, blob.digest)
        size = sizes.pop(key, None)
        if size is None and check.store.head(key) is None:
            check.problem(key, "missing, and the statement names it")
        elif size is not None and size != blob.size_bytes:
            check.problem(key, f"wanted {blob.size_bytes} bytes, found {size}")
        else:
            whole.append(blob)
    for key in sizes:
        check.note(key, "an orphan: the artifact's statement does not name it; gc removes it with the artifact")
    return whole


def _check_bytes(check: _Check, statement: Statement, blobs: list[Blob]) -> None:
    for blob in blobs:
        key = pack_key(statement.artifact, blob.digest)
        try:
            data = check.store.get(key, blob.size_bytes)
            if data is None:
                raise IntegrityError("object", "missing in the store")
            open_blob(data, blob)
            if blob == statement.table:
                read_file_table(check.store, statement)
        except IntegrityError as error:
            check.problem(key, str(error))


def _check_rows(check: _Check, index: Index, counts: str, artifacts: Mapping[str, _Known]) -> bool:
    """Returns whether a version that gc would protect, and that is not current, names what is gone."""
    where = f"{index.name}@{index.channel}:{index.version}"
    if counts == CURRENT and check.now > parse_timestamp(index.expires_at, "index"):
        check.note(where, f"has expired at {index.expires_at}: `cachepipe renew`")
    for row in index.rows:
        found = artifacts.get(row.artifact)
        if row.statement in index.revoked:
            check.problem(where, f"names {row.artifact}, which it revokes")
        if found is not None and found.row != row:
            check.problem(where, f"names {row.artifact} with another statement than it has: {row.statement}")
        elif found is not None and found.release != index.name:
            check.problem(where, f"names {row.artifact}, which is of the release {found.release}")
        elif found is None and counts == CURRENT:
            check.problem(where, f"is current and names {row.artifact}, which has no readable statement")
    return bool(counts) and counts != CURRENT and any(row.artifact not in artifacts for row in index.rows)


def _note_the_rest(check: _Check, inventory: Inventory) -> None:
    for found in inventory.foreign:
        check.note(printable(found.key), "none of ours: no command reads or removes it")
    for artifact, held in inventory.artifacts.items():
        if held.statement is None and held.packs:
            hours = min(pack.age_s for pack in held.packs) / 3600
            check.note(
                f"{ARTIFACTS}{artifact}/",
                f"unfinished: {len(held.packs)} objects without a statement, {hours:.1f} hours old; gc removes it after a day",
            )
        for left in stale_announcements(held, FLOORS):
            check.note(left.key, f"left by a crash {_hours(left)} ago: gc removes it")


def _hours(found: Seen) -> str:
    return f"{found.age_s / 3600:.0f} hours"
