"""The store's part of a checkup: reachable, with which rights, are conditions honoured, when do channels expire."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import partial

from cachepipe.adapters.store import NO_CHOICE, Store, TrustChoice, open_store
from cachepipe.adapters.store_trust import StoreTrust
from cachepipe.domain.checkup import FAIL, NOTE, WARN, Check
from cachepipe.domain.index import parse_timestamp
from cachepipe.domain.layout import INDEXES, place_of
from cachepipe.errors import CachepipeError, StoreError
from cachepipe.workflows.doctor_ask import Question, answers
from cachepipe.workflows.doctor_trust import trust_checks
from cachepipe.workflows.fetch import Channel, check_format, newest, read_artifact
from cachepipe.workflows.host import this_machine

SOON = timedelta(days=3)
"""A channel that expires within it should be renewed now."""
MAX_CHANNELS = 50


@dataclass
class _Found:
    """What the answers to earlier questions leave for later ones."""

    store: Store | None = None
    pairs: tuple[tuple[str, str], ...] | None = None
    """Release and channel, of all that the store has; None: the store cannot be listed."""
    channels: list[Channel] = field(default_factory=list)
    fitting: list[str] = field(default_factory=list)
    """Artifacts that fit this machine."""


def store_checks(
    url: str | None, names: Sequence[str], channel: str, now: datetime, probes: bool, trust: TrustChoice = NO_CHOICE
) -> list[Check]:
    """Returns the checks of a store; without one a note, or a failure when releases are named.

    Args:
        url: None: no store is named.
        names: releases to look at, each of which must be usable here; empty: all of the store.
        channel: looked at for each of `names`.
        now: at which channels must not have expired.
        probes: write one object twice, and remove it.
        trust: under which the store is read.
    """
    if not url:
        missing = f"none named, in which {', '.join(names)} could be" if names else "none named"
        none = Check("store", "store", missing, FAIL if names else NOTE, "name it, or set CACHEPIPE_STORE")
        return [none, *_trust(StoreTrust(trust, "", "no store", now), (), now)]
    found = _Found()
    rows = answers([Question("store", url, lambda: _reached(found, url, trust, now))])
    store = found.store
    if store is None:
        return rows + _trust(StoreTrust(trust, "", url, now), (), now)
    questions = [Question("store", "rights", lambda: _rights(found, store))]
    questions += [Question("store", "conditions", lambda: [_conditions(store, probes)])]
    rows += answers(questions)
    pairs = [(name, channel) for name in dict.fromkeys(names)] if names else (found.pairs or ())
    asked = pairs[:MAX_CHANNELS]
    rows += answers(
        [Question("store", "@".join(pair), partial(_channel, found, store, pair, bool(names), now)) for pair in asked]
    )
    if len(asked) < len(pairs):
        text, advice = f"{len(pairs) - len(asked)} more channels were not looked at", "name releases: `--name NAME`"
        rows.append(Check("store", "channels", text, NOTE, advice))
    if asked and not names and not found.fitting:
        advice = "build for this machine, or run on one like the builder's: every start from this store is cold here"
        rows.append(Check("store", "channels", "nothing in this store can be used here", FAIL, advice))
    return rows + _trust(store.trust, found.channels, now)


def _trust(trust: StoreTrust, channels: Sequence[Channel], now: datetime) -> list[Check]:
    return answers([Question("trust", "policy", lambda: trust_checks(trust, channels, now))])


def _reached(found: _Found, url: str, trust: TrustChoice, now: datetime) -> list[Check]:
    store = open_store(url, trust, now)
    has_format = check_format(store)
    found.store = store
    if has_format:
        return [Check("store", store.url, "reachable, format 1")]
    advice = "look whether the address is right and mounted; the first `cachepipe build` makes the store"
    return [Check("store", store.url, "nothing was ever published here", FAIL, advice)]


def _rights(found: _Found, store: Store) -> list[Check]:
    rows = [Check("store", "rights", "read")]
    try:
        places = (place_of(key) for key in store.list(INDEXES))
        found.pairs = tuple(sorted({(one.name, one.channel) for one in places if one and one.kind == "index"}))
        rows.append(Check("store", "rights", "list (builders and `ls` need it, a restore does not)"))
    except StoreError as error:
        advice = "a restore needs none; `ls`, `gc` and `build` do"
        rows.append(Check("store", "rights", f"no list: {error}", NOTE, advice))
    return rows


def _conditions(store: Store, probes: bool) -> Check:
    if not probes:
        return Check("store", "conditions", "not tried", NOTE, "`--probe` writes one object twice, and removes it")
    key = f"v1/probes/doctor/{os.urandom(16).hex()}"
    try:
        is_made, is_made_again = store.put_if_absent(key, b"1"), store.put_if_absent(key, b"2")
    except StoreError as error:
        return Check("store", "conditions", f"no write: {error}", NOTE, "a service needs none; a builder does")
    try:
        if is_made and not is_made_again:
            return Check("store", "conditions", "write, and a second creation is refused")
        advice = "two builders could overwrite each other: use a store with conditional writes (S3's `If-None-Match`)"
        return Check("store", "conditions", "a second creation of one object was not refused", FAIL, advice)
    finally:
        store.delete(key)


def _channel(found: _Found, store: Store, pair: tuple[str, str], is_named: bool, now: datetime) -> list[Check]:
    """Returns expiry and fit of a channel; where it is named, whatever keeps a start cold is a failure."""
    channel = newest(store, *pair)
    if channel is None:
        return [Check("store", "@".join(pair), "nothing is published under this name", FAIL, _instead(found, *pair))]
    found.channels.append(channel)
    index = channel.index
    name = f"{index.name}@{index.channel}:{index.version}"
    rows = [_expiry(channel, name, now)]
    try:
        row = this_machine(index.rows).select(index.rows, name, index.revoked)
        if is_named:
            read_artifact(store, row, index.name)
        found.fitting.append(row.artifact)
        rows.append(Check("store", name, f"fits this machine: {row.artifact}"))
    except CachepipeError as error:
        rows.append(Check("store", name, str(error), FAIL if is_named else WARN, error.hint))
    return rows


def _instead(found: _Found, name: str, channel: str) -> str:
    """Says what to do about a channel that is not there, from what is."""
    pairs = found.pairs or ()
    others = [other for one, other in pairs if one == name]
    if others:
        return f"it is in {', '.join(others)}: `cachepipe promote` it, or name that channel: `--channel`"
    near = get_close_matches(name, [one for one, _ in pairs], 1)
    return f"did you mean `{near[0]}`?" if near else f"`cachepipe ls` shows what there is; build and promote `{name}`"


def _expiry(found: Channel, name: str, now: datetime) -> Check:
    expires_at = found.index.expires_at
    left = parse_timestamp(expires_at, "expires_at") - now
    if left <= timedelta():
        advice = "`cachepipe renew` it, or promote again: services start cold until then"
        return Check("store", name, f"expired {expires_at}, {found.status}", FAIL, advice)
    text = f"expires {expires_at}, {found.status}"
    if left <= SOON:
        return Check("store", name, text, WARN, "`cachepipe renew` it within that time, or promote again")
    return Check("store", name, text)
