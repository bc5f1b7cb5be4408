"""Properties of what a restore trusts (T-PROP), over generated values: paths, indexes, policies, signatures, limits."""

from __future__ import annotations

import json
import posixpath
import string
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain.artifact import Blob, check_path, read_table
from cachepipe.domain.fingerprint import Fingerprint, Part
from cachepipe.domain.freshness import check_fresh, expiry
from cachepipe.domain.index import (
    PAYLOAD_TYPE,
    Index,
    IndexRow,
    advance,
    first_index,
    index_bytes,
    parse_timestamp,
    read_index,
    select,
    timestamp,
    with_row,
)
from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.policy import FORMAT, ChannelRule, Key, Policy, policy_bytes, read_policy
from cachepipe.domain.trust import Signature, open_envelope, seal, verify
from cachepipe.errors import IntegrityError, TrustError
from tests.support import authority
from tests.support.authority import key, policy

PARTS = st.text(string.ascii_letters + string.digits + "._+=-/\\ \0é", max_size=12)
PATHS = st.lists(PARTS, min_size=1, max_size=18).map("/".join)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
TIMES = st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1)).map(
    lambda t: t.replace(microsecond=0, tzinfo=timezone.utc)
)
DEVICES = st.sampled_from(["cpu", "cuda"])


@st.composite
def rows(draw: st.DrawFn) -> IndexRow:
    parts = (Part("torch", draw(st.sampled_from(["2.11", "2.13"]))), Part("threads", draw(st.sampled_from(["2", "4"]))))
    return IndexRow(
        draw(st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZ", min_size=26, max_size=26)), draw(DIGESTS), 1, 1,
        draw(DEVICES), parts, timestamp(draw(TIMES)),
    )  # fmt: skip


INDEXES = st.builds(
    lambda found, now, revoked: replace(first_index("demo", "stable", tuple(found), now, "n"), revoked=tuple(revoked)),
    st.lists(rows(), max_size=5), TIMES, st.lists(DIGESTS, max_size=3),
)  # fmt: skip


@given(PATHS)
def test_a_path_that_is_accepted_stays_below_every_folder_and_means_one_thing(path: str) -> None:
    try:
        check_path(path)
    except IntegrityError:
        return
    assert posixpath.normpath(path) == path
    assert posixpath.normpath(f"/base/{path}") == f"/base/{path}"
    assert not path.startswith("/")
    assert path.isascii() and path.isprintable() and "\\" not in path and " " not in path
    assert len(path) <= LIMITS.path_bytes and path.count("/") < LIMITS.path_parts


@given(
    st.lists(st.text(string.ascii_letters + string.digits + "_+=-", min_size=1, max_size=20), min_size=1, max_size=16)
)
def test_an_ordinary_path_is_accepted(parts: list[str]) -> None:
    check_path("/".join(parts))


@given(INDEXES)
def test_an_index_comes_back_as_it_was_and_under_no_other_name(index: Index) -> None:
    data = index_bytes(index)
    assert read_index(data, "demo", "stable", 1) == index
    for asked in (("other", "stable", 1), ("demo", "canary", 1), ("demo", "stable", 2)):
        with pytest.raises(IntegrityError):
            read_index(data, *asked)


@given(INDEXES, TIMES, st.lists(rows(), max_size=3))
def test_the_next_version_is_one_higher_and_forgets_no_revocation(
    index: Index, now: datetime, found: list[IndexRow]
) -> None:
    after = advance(index, tuple(found), now, "m")
    assert after.version == index.version + 1
    assert after.revoked == index.revoked
    assert (after.name, after.channel, after.rows) == (index.name, index.channel, tuple(found))
    assert parse_timestamp(after.expires_at, "x") - parse_timestamp(after.created_at, "x") == timedelta(days=14)


@given(st.lists(rows(), max_size=6), rows())
def test_a_new_row_replaces_its_own_target_alone(found: list[IndexRow], row: IndexRow) -> None:
    after = with_row(found, row)
    assert after[-1] == row
    assert with_row(after, row) == after
    kept = [old for old in found if (old.device, old.fingerprint) != (row.device, row.fingerprint)]
    assert list(after[:-1]) == kept


@given(st.lists(rows(), min_size=1, max_size=6), st.data())
def test_what_is_selected_fits_is_the_newest_and_not_revoked(found: list[IndexRow], data: st.DataObject) -> None:
    machine = Fingerprint(data.draw(st.sampled_from(found)).fingerprint)
    revoked = data.draw(st.lists(st.sampled_from([row.statement for row in found]), max_size=3))
    fitting = [row for row in found if Fingerprint(row.fingerprint) == machine and row.statement not in revoked]
    try:
        chosen = select(found, machine, "x", revoked)
    except Exception:
        assert not fitting
        return
    assert chosen in fitting
    assert all((row.created_at, row.artifact) <= (chosen.created_at, chosen.artifact) for row in fitting)


KEYS = st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True, min_size=1)


@given(KEYS, KEYS, st.integers(1, 4))
def test_a_payload_is_accepted_exactly_when_enough_listed_keys_signed_it(
    listed: list[str], signing: list[str], wanted: int
) -> None:
    judge = Policy(FORMAT, tuple(key(label, "index") for label in listed), {"index": wanted})
    envelope = authority.sealed(b"x", PAYLOAD_TYPE, *signing)
    is_enough = len(set(listed) & set(signing)) >= wanted
    try:
        verify(envelope, PAYLOAD_TYPE, "x", judge, None)
        assert is_enough
    except TrustError:
        assert not is_enough


@given(st.lists(st.tuples(st.text(max_size=10), st.binary(max_size=20)), max_size=8, unique_by=lambda pair: pair[0]))
def test_the_order_of_signatures_does_not_count(pairs: list[tuple[str, bytes]]) -> None:
    signatures = [Signature(*pair) for pair in pairs]
    envelope = seal(b"x", "t", signatures)
    assert envelope == seal(b"x", "t", signatures[::-1])
    assert set(open_envelope(envelope, "t", "x").signatures) == set(signatures)


RULES = st.builds(ChannelRule, st.integers(1, 100), st.none() | st.integers(1, 10**7))


@given(st.dictionaries(st.sampled_from(["stable", "demo@stable", "canary"]), RULES), st.lists(DIGESTS, max_size=3))
def test_a_policy_comes_back_as_it_was(channels: dict[str, ChannelRule], revoked: list[str]) -> None:
    whole = policy(key("a", "statement"), key("d", "dev"), channels=channels, revoked=tuple(revoked))
    assert read_policy(policy_bytes(whole)) == whole


@given(RULES, RULES, INDEXES, st.integers(-400, 20 * 86400))
def test_another_rule_never_makes_a_policy_laxer(
    one: ChannelRule, other: ChannelRule, index: Index, seconds: int
) -> None:
    now = parse_timestamp(index.created_at, "x") + timedelta(seconds=seconds)
    strict = Policy(FORMAT, (), channels={"stable": one, "demo@stable": other})
    assert expiry(index, strict) <= expiry(index, Policy(FORMAT, (), channels={"stable": one}))
    try:
        check_fresh(index, strict, now)
    except TrustError:
        return
    for laxer in ({"stable": one}, {"demo@stable": other}, {}):
        check_fresh(index, Policy(FORMAT, (), channels=laxer), now)


@given(st.sampled_from(["statement", "index"]), st.booleans(), st.booleans())
def test_a_key_has_the_roles_that_are_listed_and_dev_has_all(role: str, is_dev: bool, is_listed: bool) -> None:
    other = "index" if role == "statement" else "statement"
    found = Key("k", "p", ("dev",) if is_dev else (role,) if is_listed else (other,))
    assert found.has_role(role) == (is_dev or is_listed)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.builds(
        Limits,
        *([st.just(1 << 20)] * 4),
        st.integers(1, 50),
        st.integers(1, 200),
        st.integers(0, 8),
        st.integers(1, 50),
    ),
    st.integers(0, 3),
)
def test_what_small_limits_accept_larger_ones_accept_too(sizes: list[int], limits: Limits, more: int) -> None:
    cuts = [[[0, sum(sizes[:n]), size]] if size else [] for n, size in enumerate(sizes)]
    rows = [[f"f{n}", 0o644, size, "0" * 64, cuts[n], [0], False] for n, size in enumerate(sizes)]
    data = json.dumps({"files": rows, "format": 1, "root": "/r"}).encode()
    pack = (Blob("0" * 64, 1, sum(sizes)),)
    larger = replace(
        limits,
        **{name: getattr(limits, name) + more for name in ("pack_raw_bytes", "unpacked_bytes", "files", "file_bytes")},
    )
    try:
        found = read_table(data, pack, 1, limits)
    except IntegrityError:
        return
    assert read_table(data, pack, 1, larger) == found
    assert len(found.files) <= limits.files and found.unpacked_bytes <= limits.unpacked_bytes
