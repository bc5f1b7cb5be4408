"""What gc may remove: nothing that a lock, a pin, an index or its age protects, whatever else is true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain.collect import (
    CURRENT,
    DAY_S,
    FLOORS,
    HOUR_S,
    Floors,
    Held,
    judge,
    protecting_versions,
    stale_announcements,
    take_inventory,
)
from cachepipe.domain.layout import index_key, pack_key, pin_key, statement_key, tomb_key
from cachepipe.domain.ulid import ulid
from tests.support.artifacts import NOW

ARTIFACT = ulid(NOW, bytes(10))


class Thing(NamedTuple):
    key: str
    size_bytes: int
    age_s: float


ages = st.floats(0, 400 * DAY_S)


@st.composite
def held_objects(draw: st.DrawFn) -> Held:
    statement = Thing(statement_key(ARTIFACT), 100, draw(ages)) if draw(st.booleans()) else None
    packs = [
        Thing(pack_key(ARTIFACT, f"{number:064x}"), 10, age)
        for number, age in enumerate(draw(st.lists(ages, max_size=4)))
    ]
    pins = [
        Thing(pin_key(ARTIFACT, f"{number:x}"), 1, age) for number, age in enumerate(draw(st.lists(ages, max_size=2)))
    ]
    tombs = [
        Thing(tomb_key(ARTIFACT, f"{number:x}"), 1, age) for number, age in enumerate(draw(st.lists(ages, max_size=2)))
    ]
    return Held(statement, list(packs), list(pins), list(tombs))


@given(held_objects(), st.booleans(), st.booleans())
def test_an_artifact_is_removed_if_and_only_if_nothing_protects_it(held: Held, is_named: bool, is_locked: bool) -> None:
    named = {ARTIFACT: "demo@stable:1 names it"} if is_named else {}
    decision = judge(ARTIFACT, held, named, {ARTIFACT} if is_locked else set())
    floor = FLOORS.published_s if held.statement else FLOORS.unfinished_s
    is_young = any(found.age_s < floor for found in held.content)
    is_pinned = any(pin.age_s < FLOORS.pin_s for pin in held.pins)
    assert decision.is_removed == (not (is_named or is_locked or is_pinned or is_young))
    assert decision.reason
    assert decision.size_bytes == sum(found.size_bytes for found in held.content)


@given(held_objects())
def test_what_is_locked_or_named_stays_even_with_floors_of_zero(held: Held) -> None:
    none = Floors(unfinished_s=0, published_s=0, versions=0, pin_s=0, tomb_s=0)
    assert not judge(ARTIFACT, held, {}, {ARTIFACT}, none).is_removed
    assert not judge(ARTIFACT, held, {ARTIFACT: "x"}, set(), none).is_removed
    assert judge(ARTIFACT, held, {}, set(), none).is_removed


@given(held_objects(), st.floats(0, 100 * DAY_S))
def test_higher_floors_never_remove_more(held: Held, more_s: float) -> None:
    higher = Floors(FLOORS.unfinished_s + more_s, FLOORS.published_s + more_s, FLOORS.versions, FLOORS.pin_s + more_s)
    if judge(ARTIFACT, held, {}, set(), higher).is_removed:
        assert judge(ARTIFACT, held, {}, set()).is_removed


@given(held_objects())
def test_only_what_crashes_left_is_stale(held: Held) -> None:
    stale = stale_announcements(held)
    assert all(found.age_s >= HOUR_S for found in stale)
    assert all(found.age_s >= DAY_S for found in stale if "/pins/" in found.key)
    assert not {found.key for found in stale} & {found.key for found in held.content}


versions_s = st.dictionaries(st.integers(1, 60), ages, min_size=1)


@given(versions_s, st.integers(0, 20))
def test_versions_protect_by_number_by_age_and_at_every_end_of_the_history(
    ages_s: Mapping[int, float], count: int
) -> None:
    floors = Floors(versions=count)
    found = protecting_versions(ages_s, floors)
    newest = sorted(ages_s, reverse=True)[:count]
    for version in ages_s:
        is_end = version + 1 not in ages_s
        was_current_lately = not is_end and ages_s[version + 1] < floors.published_s
        assert (version in found) == (is_end or version in newest or was_current_lately)
        assert (found.get(version) == CURRENT) == is_end


def test_the_floors_are_those_that_the_readme_promises() -> None:
    assert (FLOORS.unfinished_s, FLOORS.published_s, FLOORS.versions) == (24 * HOUR_S, 30 * DAY_S, 10)


def test_a_version_protects_until_thirty_days_after_it_was_replaced() -> None:
    ages_s = {version: (20 - version) * 7 * DAY_S for version in range(1, 21)}  # one a week, the newest now
    assert sorted(protecting_versions(ages_s)) == list(range(11, 21))
    daily = {version: (20 - version) * DAY_S for version in range(1, 21)}
    assert sorted(protecting_versions(daily)) == list(range(1, 21))


def test_an_inventory_sorts_objects_by_what_they_are_and_leaves_foreign_ones_alone() -> None:
    keys = [
        statement_key(ARTIFACT),
        pack_key(ARTIFACT, "a" * 64),
        pin_key(ARTIFACT, "1"),
        tomb_key(ARTIFACT, "2"),
        index_key("demo", "stable", 3),
        "v1/index/demo/stable/hint",
        "v1/format.json",
        f"v1/artifacts/{ARTIFACT}/packs/notes.txt",
        "v1/README",
    ]
    inventory = take_inventory(Thing(key, 1, 2.0) for key in keys)
    held = inventory.artifacts[ARTIFACT]
    assert [found.key for found in held.content] == keys[:2]
    assert [[pin.key for pin in held.pins], [tomb.key for tomb in held.tombs]] == [[keys[2]], [keys[3]]]
    assert list(inventory.indexes) == [("demo", "stable")] and list(inventory.indexes["demo", "stable"]) == [3]
    assert inventory.has_format
    assert [found.key for found in inventory.foreign] == keys[7:]
