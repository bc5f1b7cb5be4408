"""What gc may remove from a store, and why it must keep the rest.

An artifact is removed only if nobody could want it:

    kept by a lock file      `--keep-lock` names it
    pinned                   a publisher, promoter or copier announced less than 24 h ago that it is using it
    named by an index        in the newest version of a channel, in one of its last ten, or until less than 30 days ago
    too young                published (it has a statement) less than 30 days ago, or unfinished and less than 24 h old

Ages are the store's own (`age_s`: seconds since an object was written), never those of two machines' clocks. Both sides announce
before they look: a publisher writes its pin, then looks for tombstones; gc writes its tombstone, then looks for pins and
indexes. So of any two at least one sees the other, and whoever sees the other gives way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cachepipe.domain.layout import Place, place_of

HOUR_S, DAY_S = 3600.0, 86400.0
CURRENT = "current"
"""Why the newest version of a channel protects its artifacts."""


class Seen(Protocol):
    """An object as a store lists it."""

    @property
    def key(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def age_s(self) -> float: ...


@dataclass(frozen=True)
class Floors:
    """Ages in seconds below which nothing is removed."""

    unfinished_s: float = DAY_S
    """Of an artifact without statement: an upload takes minutes, and its pin says so as well."""
    published_s: float = 30 * DAY_S
    """Since it was published, and since it was last current in a channel: time to roll back, and to replace lock files."""
    versions: int = 10
    """Newest versions of every channel whose artifacts stay whatever their age."""
    pin_s: float = DAY_S
    """An older pin was left by a crash: whoever pins gives up after half of it."""
    tomb_s: float = HOUR_S
    """An older tombstone was left by a crash: gc gives up after a sixth of it."""


FLOORS = Floors()


@dataclass
class Held:
    """The objects of one artifact."""

    statement: Seen | None = None
    packs: list[Seen] = field(default_factory=list)
    pins: list[Seen] = field(default_factory=list)
    tombs: list[Seen] = field(default_factory=list)

    @property
    def content(self) -> list[Seen]:
        return [*([self.statement] if self.statement else ()), *self.packs]


@dataclass(frozen=True)
class Inventory:
    """Everything below a store's prefix, by what it is."""

    artifacts: Mapping[str, Held]
    """Also those of which only pins or tombstones are left."""
    indexes: Mapping[tuple[str, str], Mapping[int, Seen]]
    """(name, channel) → version → object."""
    foreign: Sequence[Seen]
    """Named by nothing in the layout; never read, never removed."""
    has_format: bool


def take_inventory(objects: Iterable[Seen]) -> Inventory:
    """Returns the objects of a list of the store, sorted by what they are."""
    artifacts: dict[str, Held] = {}
    indexes: dict[tuple[str, str], dict[int, Seen]] = {}
    foreign: list[Seen] = []
    has_format = False
    for found in objects:
        place = place_of(found.key)
        if place is None:
            foreign.append(found)
        elif place.kind == "format":
            has_format = True
        elif place.kind == "index":
            indexes.setdefault((place.name, place.channel), {})[place.version] = found
        elif place.artifact:
            _hold(artifacts.setdefault(place.artifact, Held()), place, found)
    return Inventory(artifacts, indexes, foreign, has_format)


def _hold(held: Held, place: Place, found: Seen) -> None:
    if place.kind == "statement":
        held.statement = found
    else:
        {"pack": held.packs, "pin": held.pins, "tomb": held.tombs}[place.kind].append(found)


def protecting_versions(ages_s: Mapping[int, float], floors: Floors = FLOORS) -> dict[int, str]:
    """Returns the versions of one channel whose artifacts must stay, each with the reason.

    Args:
        ages_s: version → seconds since it was written.
        floors: how many versions, and how long after a version was replaced.

    A version is current as long as its successor is absent: where the history has a gap, readers can end at either side of it.
    """
    newest = set(sorted(ages_s)[-floors.versions :] if floors.versions > 0 else ())
    found = {}
    for version in sorted(ages_s):
        replaced_s = ages_s.get(version + 1)
        if replaced_s is None:
            found[version] = CURRENT
        elif version in newest:
            found[version] = f"among the last {floors.versions} versions"
        elif replaced_s < floors.published_s:
            found[version] = f"current until {_days(replaced_s)} ago"
    return found


@dataclass(frozen=True)
class Decision:
    """What becomes of one artifact."""

    artifact: str
    is_removed: bool
    reason: str
    objects: int
    size_bytes: int


def judge(
    artifact: str, held: Held, named: Mapping[str, str], locked: Collection[str], floors: Floors = FLOORS
) -> Decision:
    """Returns whether an artifact may be removed, by the rules of the module's docstring.

    Args:
        artifact: its id.
        held: its objects.
        named: artifact → why an index keeps it, from all `protecting_versions`.
        locked: artifacts that a lock file names.
        floors: ages.
    """
    keep = _reason_to_keep(artifact, held, named, locked, floors)
    content = held.content
    why = f"published {_days(_youngest_s(content))} ago, no index that counts names it"
    if held.statement is None:
        why = f"unfinished for {_days(_youngest_s(content))}" if content else "nothing but announcements is left"
    return Decision(artifact, keep is None, keep or why, len(content), sum(found.size_bytes for found in content))


def _reason_to_keep(
    artifact: str, held: Held, named: Mapping[str, str], locked: Collection[str], floors: Floors
) -> str | None:
    if artifact in locked:
        return "a lock file names it"
    if artifact in named:
        return named[artifact]
    if any(pin.age_s < floors.pin_s for pin in held.pins):
        return "pinned: it is being published, promoted or copied"
    age_s = _youngest_s(held.content)
    if held.statement is not None and age_s < floors.published_s:
        return f"published {_days(age_s)} ago"
    if held.statement is None and held.content and age_s < floors.unfinished_s:
        return f"unfinished for {_days(age_s)}"
    return None


def stale_announcements(held: Held, floors: Floors = FLOORS) -> list[Seen]:
    """Returns the pins and tombstones of an artifact that crashes have left."""
    pins = [pin for pin in held.pins if pin.age_s >= floors.pin_s]
    return pins + [tomb for tomb in held.tombs if tomb.age_s >= floors.tomb_s]


def _youngest_s(objects: Sequence[Seen]) -> float:
    return min((found.age_s for found in objects), default=0.0)


def _days(age_s: float) -> str:
    days = age_s / DAY_S
    return f"{days:.0f} days" if days >= 2 else f"{age_s / HOUR_S:.1f} hours"
