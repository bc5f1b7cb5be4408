"""What a restore may choose among: the rows of each release that was asked for, bounded by this node's floors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cachepipe.adapters.store import Store
from cachepipe.domain.freshness import check_floor, expiry
from cachepipe.domain.index import IndexRow, age_warning, timestamp
from cachepipe.domain.names import check_name
from cachepipe.errors import UsageError
from cachepipe.workflows import floors, present
from cachepipe.workflows.fetch import read_channel
from cachepipe.workflows.outcome import RestoreRequest


@dataclass(frozen=True)
class Source:
    """The rows among which one release is chosen, and where they come from."""

    name: str
    rows: tuple[IndexRow, ...]
    revoked: tuple[str, ...]
    channel: str
    version: int
    expires_at: str
    created_at: str = ""
    ends_at: str = ""
    """These two: `Marker.index_created_at`, `Marker.index_ends_at`."""
    warning: str = ""
    """The channel has lived more than half of its life."""


def offered(request: RestoreRequest, store: Store) -> list[Source]:
    """Returns what the lock files pin, and of other releases what their channel holds.

    A channel's version is remembered at once, whatever becomes of the start: what it revokes may be all that there is.

    Raises:
        UsageError: no release is named, or a lock file is not for it.
        MissError, TrustError, StoreError, IntegrityError: a channel cannot be used, or this node has seen a newer version of it.
    """
    options = request.options
    locks = {lock.name: lock for lock in present.read_locks(options)}
    names = options.names or tuple(locks)
    if not names:
        raise UsageError("no release is named", hint="say which: `--name NAME` or `--lock FILE`")
    if len(set(names)) != len(names):
        raise UsageError(f"a release is named twice: {', '.join(names)}")
    sources = []
    for name in names:
        check_name(name, "the release name")
        if name in locks:
            lock = locks[name]
            sources.append(Source(name, lock.rows, store.trust.policy.revoked, "", lock.version, ""))
        else:
            sources.append(_channel_source(store, name, options.channel, request.now))
            _bound(request, store, sources[-1], "")
    return sources


def bound(request: RestoreRequest, store: Store, sources: Sequence[Source], folder: str) -> None:
    """Returns if this node has seen no newer versions of the channels, which are then remembered beside the folder as well.

    Raises:
        TrustError: it has; where that is written is named.
    """
    for source in sources:
        if source.channel:
            _bound(request, store, source, folder)


def _bound(request: RestoreRequest, store: Store, source: Source, folder: str) -> None:
    if not store.trust.has_policy_file:
        return  # such a store may be made anew at will
    label = f"{source.name}@{source.channel}:{source.version}"
    for floor in floors.floors(request, source.name, folder):
        whose = f"{floor.path} says that this node has seen"
        check_floor(label, source.version, floor.seen(), whose, kept=floor.path)
    floors.remember(request, source.name, source.version, folder)


def warnings(sources: Sequence[Source]) -> list[str]:
    """Returns what a start has to say of its channels."""
    return [source.warning for source in sources if source.warning]


def _channel_source(store: Store, name: str, channel: str, now: datetime) -> Source:
    found, policy = read_channel(store, name, channel, now), store.trust.policy
    index = found.index
    ends = timestamp(expiry(index, policy))
    warning = age_warning(f"{name}@{channel}:{index.version}", index.created_at, ends, now)
    usable_until = min(text for text in (ends, found.not_after) if text)
    revoked = (*index.revoked, *policy.revoked)
    return Source(name, index.rows, revoked, channel, index.version, usable_until, index.created_at, ends, warning)
