"""The store's part of a checkup: reachable, with which rights, are conditions honoured, when do channels expire."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from cachepipe.adapters.store import NO_CHOICE, Store, TrustChoice, open_store
from cachepipe.domain.checkup import FAIL, NOTE, OK, WARN, Check
from cachepipe.domain.index import parse_timestamp
from cachepipe.errors import CachepipeError, StoreError
from cachepipe.workflows.doctor_trust import trust_checks
from cachepipe.workflows.fetch import Channel, check_format, newest
from cachepipe.workflows.host import this_machine

SOON = timedelta(days=3)
"""A channel that expires within it should be renewed now."""
MAX_CHANNELS = 50


def store_checks(
    url: str | None, names: Sequence[str], channel: str, now: datetime, probes: bool, trust: TrustChoice = NO_CHOICE
) -> list[Check]:
    """Returns the checks of a store; without one a note.

    Args:
        url: None: no store is named.
        names: releases to look at; empty: all of the store.
        channel: looked at for each of `names`.
        now: at which channels must not have expired.
        probes: write one object twice, and remove it.
        trust: under which the store is read.
    """
    if not url:
        return [Check("store", "store", "none named", NOTE, "name it, or set CACHEPIPE_STORE")]
    try:
        store = open_store(url, trust, now)
        has_format = check_format(store)
    except CachepipeError as error:
        return [Check("store", url, str(error), FAIL, error.hint)]
    value = "reachable, format 1" if has_format else "reachable, and empty"
    rows = [
        Check(
            "store",
            store.url,
            value,
            OK if has_format else WARN,
            "" if has_format else "nothing was published here yet",
        )
    ]
    rows += _rights(store, probes)
    found = list(_channels(store, names, channel))
    rows += [check for one in found for check in _channel(one, now)]
    missing = sorted(set(names) - {one.index.name for one in found})
    rows += [
        Check("store", f"{name}@{channel}", "nothing is published", FAIL, "build and promote it") for name in missing
    ]
    return [*rows, *trust_checks(store, found, now)]


def _rights(store: Store, probes: bool) -> list[Check]:
    rows = [Check("store", "rights", "read")]
    try:
        next(iter(store.list("v1/index/")), None)
        rows.append(Check("store", "rights", "list (builders and `ls` need it, a restore does not)"))
    except StoreError as error:
        rows.append(
            Check("store", "rights", f"no list: {error}", NOTE, "a restore needs none; `ls`, `gc` and `build` do")
        )
    if not probes:
        return [
            *rows,
            Check("store", "conditions", "not tried", NOTE, "`--probe` writes one object twice, and removes it"),
        ]
    return [*rows, _conditions(store)]


def _conditions(store: Store) -> Check:
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


def _channels(store: Store, names: Sequence[str], channel: str) -> Iterator[Channel]:
    pairs = [(name, channel) for name in names]
    if not names:
        keys = (key.split("/") for key in store.list("v1/index/"))
        pairs = sorted({(parts[2], parts[3]) for parts in keys if len(parts) > 3})[:MAX_CHANNELS]
    for name, one in pairs:
        found = newest(store, name, one)
        if found is not None:
            yield found


def _channel(found: Channel, now: datetime) -> list[Check]:
    index = found.index
    name = f"{index.name}@{index.channel}:{index.version}"
    left = parse_timestamp(index.expires_at, "expires_at") - now
    text = f"expires {index.expires_at}"
    verdict, advice = OK, ""
    if left <= timedelta():
        verdict, text, advice = (
            FAIL,
            f"expired {index.expires_at}",
            "`cachepipe renew` it, or promote again: services start cold until then",
        )
    elif left <= SOON:
        verdict, advice = WARN, "`cachepipe renew` it within that time, or promote again"
    rows = [Check("store", name, f"{text}, {found.status}", verdict, advice)]
    try:
        row = this_machine(index.rows).select(index.rows, name, index.revoked)
        rows.append(Check("store", name, f"fits this machine: {row.artifact}"))
    except CachepipeError as error:
        rows.append(Check("store", name, str(error), WARN, error.hint))
    return rows
