"""gc: removing what nobody can want any more, so that no publisher, promoter or reader ever loses what it was promised.

1 survey: list the store, read the index versions that protect something, decide (`domain/collect.py`); a dry run ends here
2 remove what crashes left: it needs no announcement, and makes room for one where the disk is full
3 announce: a tombstone for each artifact of a batch
4 look again: pins, indexes and objects; whoever is wanted by now loses its tombstone and stays
5 remove: statement (the artifact no longer exists), packs, our tombstone last

Interrupted at any point it leaves artifacts that are whole or have no statement, and the next run finishes.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cachepipe.adapters.store import Store, StoredObject
from cachepipe.domain.collect import (
    FLOORS,
    Decision,
    Floors,
    Held,
    Inventory,
    judge,
    protecting_versions,
    stale_announcements,
    take_inventory,
)
from cachepipe.domain.layout import ARTIFACTS, INDEXES, PINS, tomb_key
from cachepipe.domain.lock import Lock
from cachepipe.domain.printable import printable
from cachepipe.domain.record import canonical_bytes
from cachepipe.errors import MissError, StoreError
from cachepipe.failpoints import reached
from cachepipe.workflows.fetch import check_format, index_as_it_is

FAIL_POINTS = (
    "gc.after_tomb",
    "gc.after_second_look",
    "gc.after_statement",
    "gc.after_first_pack",
    "gc.after_packs",
    "gc.after_untomb",
)
BATCH = 50
"""Artifacts per announcement: two lists serve all of them, and publishers wait for one batch only."""


@dataclass(frozen=True)
class Collection:
    """What gc found and did."""

    store: str
    is_dry_run: bool
    decisions: tuple[Decision, ...]
    """Of every artifact, sorted by id, which is by age; after a run that deletes: what became of it."""
    announcements: tuple[str, ...]
    """Keys of pins and tombstones that crashes have left."""
    foreign: tuple[str, ...]
    """Keys that are none of ours; they stay."""
    unknown_locked: tuple[str, ...]
    """Artifacts that a lock file names and the store does not have."""

    @property
    def removed(self) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.decisions if decision.is_removed)


@dataclass
class _Run:
    store: Store
    floors: Floors
    locked: frozenset[str]
    rows: dict[tuple[str, str, int], tuple[str, ...]] = field(default_factory=dict)
    """(name, channel, version) → artifacts; versions never change, so each is read once."""


def gc(
    store: Store,
    locks: Sequence[Lock] = (),
    floors: Floors = FLOORS,
    *,
    deletes: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Collection:
    """Returns what may be removed, and with `deletes` removes it.

    Args:
        store: where.
        locks: what they name stays.
        floors: ages and numbers below which nothing is removed.
        deletes: False: nothing is written.
        say: gets one line per removed artifact.

    Raises:
        MissError: there is no store.
        IntegrityError, TrustError: an index that counts cannot be read, so nobody knows what it names; nothing was removed.
        StoreError, NoRoomError: the store fails, has another format, or its clock and ours differ.
    """
    if not check_format(store):
        raise MissError(f"there is no store at {store.url}", hint="look whether the address is right and mounted")
    run = _Run(store, floors, frozenset(row.artifact for lock in locks for row in lock.rows))
    inventory = take_inventory(store.list_objects("v1/"))  # 1
    decisions = _decide(run, inventory)
    stale = [found.key for held in inventory.artifacts.values() for found in stale_announcements(held, floors)]
    unknown = sorted(run.locked - {decision.artifact for decision in decisions})
    if deletes:
        doomed = [decision for decision in decisions if decision.is_removed]
        done: dict[str, Decision] = {}
        store.sweep(max(floors.unfinished_s, FLOORS.unfinished_s))  # 2
        store.delete_all(stale)
        for start in range(0, len(doomed), BATCH):
            done |= _remove_batch(run, doomed[start : start + BATCH], say)
        decisions = [done.get(decision.artifact, decision) for decision in decisions]
    foreign = tuple(printable(found.key) for found in inventory.foreign)
    return Collection(store.url, not deletes, tuple(decisions), tuple(sorted(stale)), foreign, tuple(unknown))


def _decide(run: _Run, inventory: Inventory) -> list[Decision]:
    named = _named(run, inventory)
    return [
        judge(artifact, held, named, run.locked, run.floors)
        for artifact, held in sorted(inventory.artifacts.items())
        if held.content
    ]


def _named(run: _Run, inventory: Inventory) -> Mapping[str, str]:
    """Returns artifact → why an index keeps it."""
    named: dict[str, str] = {}
    for (name, channel), versions in sorted(inventory.indexes.items()):
        ages_s = {version: found.age_s for version, found in versions.items()}
        for version, reason in sorted(protecting_versions(ages_s, run.floors).items()):
            place = (name, channel, version)
            if place not in run.rows:
                _, index = index_as_it_is(run.store, name, channel, version)
                run.rows[place] = tuple(row.artifact for row in index.rows)
            named |= dict.fromkeys(run.rows[place], f"{name}@{channel}:{version} names it, {reason}")
    return named


def _remove_batch(run: _Run, doomed: Sequence[Decision], say: Callable[[str], None]) -> dict[str, Decision]:
    """Returns what became of each artifact; our tombstones are gone when it ends, whatever ended it but a kill."""
    own = os.urandom(16).hex()
    artifacts = [decision.artifact for decision in doomed]
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    done: dict[str, Decision] = {}
    try:
        for artifact in artifacts:
            run.store.put_if_absent(tomb_key(artifact, own), canonical_bytes({"artifact": artifact}))  # 3
        _check_clock(run.store, tomb_key(artifacts[0], own))
        reached("gc.after_tomb")
        judged = {decision.artifact: decision for decision in _decide(run, _look_again(run.store, artifacts))}  # 4
        reached("gc.after_second_look")
        for before in doomed:
            decision = judged.get(before.artifact, before)  # gone by now: another gc was faster
            if decision.is_removed and time.clock_gettime(time.CLOCK_BOOTTIME) - began > run.floors.tomb_s / 6:
                decision = dataclasses.replace(decision, is_removed=False, reason="ran out of time: run gc again")
            if decision.is_removed:
                _remove(run, decision.artifact, own)  # 5
                say(f"removed {decision.artifact}: {decision.reason}")
            done[decision.artifact] = decision
    finally:
        run.store.delete_all(tomb_key(artifact, own) for artifact in artifacts if artifact not in done)
        run.store.delete_all(tomb_key(name, own) for name, decision in done.items() if not decision.is_removed)
    return done


def _look_again(store: Store, artifacts: Sequence[str]) -> Inventory:
    def objects() -> Iterator[StoredObject]:
        for prefix in (PINS, INDEXES):
            yield from store.list_objects(prefix)
        for artifact in artifacts:
            yield from store.list_objects(f"{ARTIFACTS}{artifact}/")

    inventory = take_inventory(objects())
    wanted = {artifact: held for artifact, held in inventory.artifacts.items() if artifact in set(artifacts)}
    return dataclasses.replace(inventory, artifacts=wanted)


def _remove(run: _Run, artifact: str, own: str) -> None:
    keys = take_inventory(run.store.list_objects(f"{ARTIFACTS}{artifact}/")).artifacts.get(artifact, Held())
    if keys.statement is not None:
        run.store.delete(keys.statement.key)
    reached("gc.after_statement")
    packs = [pack.key for pack in keys.packs]
    run.store.delete_all(packs[:1])
    reached("gc.after_first_pack")
    run.store.delete_all(packs[1:])
    reached("gc.after_packs")
    run.store.delete(tomb_key(artifact, own))
    reached("gc.after_untomb")


def _check_clock(store: Store, fresh: str) -> None:
    found = store.head(fresh)
    if found is not None and found.age_s > 300:
        raise StoreError(
            f"an object that was just written is {found.age_s:.0f} s old: the clocks of this machine and of the store differ",
            hint="set the clocks: gc goes by the age of objects",
        )
