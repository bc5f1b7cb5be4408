"""A trust policy that says something odd is refused; one that says something is obeyed to the letter."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from cachepipe.domain.limits import LIMITS
from cachepipe.domain.policy import ChannelRule, policy_bytes, read_policy
from cachepipe.errors import TrustError
from tests.support.authority import key, policy

FULL = policy(
    key("s", "statement", not_after="2027-03-01T00:00:00Z"),
    key("s2", "statement"),
    key("i", "index"),
    key("d", "dev"),
    thresholds={"statement": 2, "index": 1},
    channels={"stable": ChannelRule(3, 86400), "demo@stable": ChannelRule(7, None)},
    revoked=("a" * 64,),
)


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(policy_bytes(FULL)), **fields}).encode()


def with_key(**fields: Any) -> bytes:
    tree = json.loads(policy_bytes(FULL))
    tree["keys"][0].update(fields)
    return json.dumps(tree).encode()


def test_a_policy_comes_back_as_it_was_in_any_spacing() -> None:
    assert read_policy(policy_bytes(FULL)) == FULL
    assert read_policy(json.dumps(json.loads(policy_bytes(FULL)), indent=4).encode()) == FULL


def test_a_policy_may_leave_out_all_but_format_and_keys() -> None:
    plain = json.dumps({"format": 1, "keys": [{"keyid": key("s").keyid, "public": "p", "roles": ["statement"]}]})
    found = read_policy(plain.encode())
    assert (found.threshold("statement"), found.minimum_index_version("demo", "stable")) == (1, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not strict JSON"),
        (b"[]", "not an object"),
        (b'{"format":1}', "field `keys` is missing"),
        (changed(format=2), "unknown format 2"),
        (changed(thresold={}), "unknown field `thresold`"),
        (changed(revoked=["abc"]), "not a statement digest"),
        (changed(thresholds={"statement": 3}), "threshold of statement: wanted 1..2, found 3"),
        (changed(thresholds={"statement": 0}), "threshold of statement"),
        (changed(thresholds={"index": 9}), "threshold of index"),
        (changed(thresholds={"dev": 1}), "unknown role 'dev'"),
        (changed(channels={"a b": {}}), "not a channel"),
        (changed(channels={"stable": {"minimum_index_version": 0}}), "number below 1"),
        (changed(channels={"stable": {"maximum_age_s": 0}}), "number below 1"),
        (changed(channels={"stable": {"maximum_age": 5}}), "unknown field `maximum_age`"),
        (changed(format=0), "unknown format 0"),
        (changed(thresholds={"index": 2}), "threshold of index: wanted 1..1, found 2"),
        (with_key(scheme="ed25519"), "scheme 'ed25519'"),
        (with_key(scheme="ecdsa"), "scheme 'ecdsa'"),
        (with_key(roles=["statement", "index", "dev"]), "a development key has the role dev alone"),
        (with_key(roles=[]), "roles"),
        (with_key(roles=["root"]), "roles"),
        (with_key(roles=["dev"]), "a development key has the role dev alone"),
        (with_key(keyid="dev-" + "0" * 64), "a development key has the role dev alone"),
        (with_key(keyid="dev-" + "0" * 64, roles=["dev", "statement"]), "a development key has the role dev alone"),
        (with_key(keyid="x"), "not a key id"),
        (with_key(not_after="tomorrow"), "not a time"),
        (with_key(not_after="2027-01-01"), "not a time"),
        (with_key(not_after="2027-1-1T0:0:0Z"), "not a time"),
        (with_key(not_after="2027-01-01T00:00:00"), "not a time"),
        (with_key(not_after="2027-01-01T00:00:00+01:00"), "not a time"),
        (with_key(not_after="0999-01-01T00:00:00.5Z"), "not a time"),
        (with_key(not_after="2027-02-30T00:00:00Z"), "not a time"),
        (with_key(keyid=key("s2").keyid), "listed twice"),
        (with_key(keyid=key("d").keyid), "listed twice"),
        (b" " * (LIMITS.small_file_bytes + 1), "too long"),
    ],
)
def test_an_odd_policy_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(TrustError) as caught:
        read_policy(data, "trust.json")
    assert message in str(caught.value)
    assert "trust.json" in str(caught.value)
    assert "keygen" in caught.value.hint


def test_every_problem_is_named_not_the_first() -> None:
    with pytest.raises(TrustError) as caught:
        read_policy(changed(format=2, revoked=["x"], channels={"": {}}))
    assert str(caught.value).count(";") == 2


def test_a_threshold_of_a_role_that_nobody_has_is_no_error_for_images_that_pin_alone() -> None:
    assert read_policy(policy_bytes(policy(key("s", "statement"), thresholds={"index": 2}))).threshold("index") == 2


def test_of_two_rules_the_stricter_number_counts() -> None:
    assert FULL.minimum_index_version("demo", "stable") == 7
    assert FULL.minimum_index_version("other", "stable") == 3
    assert FULL.minimum_index_version("demo", "candidate") == 1


def many(holders: int, number: int) -> bytes:
    keys = [{"keyid": f"{n:064x}", "public": "p", "roles": ["statement"]} for n in range(holders)]
    return json.dumps({"format": 1, "keys": keys, "thresholds": {"statement": number} if number else {}}).encode()


def test_numbers_at_their_borders_are_allowed() -> None:
    most = LIMITS.signatures
    assert read_policy(many(most + 1, most)).threshold("statement") == most
    with pytest.raises(TrustError, match=f"threshold of statement: wanted 1..{most}, found {most + 1}"):
        read_policy(many(most + 1, most + 1))
    with pytest.raises(TrustError, match=r"threshold of index: wanted 1\.\.1, found 0"):
        read_policy(policy_bytes(policy(key("s", "statement"), thresholds={"index": 0})))
    rule = read_policy(changed(channels={"stable": {"minimum_index_version": 1, "maximum_age_s": 1}})).channels[
        "stable"
    ]
    assert rule == ChannelRule(1, 1)
    assert len(read_policy(many(300, 0)).keys) == 300


LONG = "x" * 100


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (with_key(keyid=LONG), 80),
        (with_key(scheme=LONG), 40),
        (changed(thresholds={LONG: 1}), 80),
        (changed(channels={f"{LONG} ": {}}), 80),
        (changed(channels={LONG: {"maximum_age_s": 0}}), 80),
        (changed(revoked=[LONG]), 80),
    ],
)
def test_of_a_long_text_only_its_begin_is_quoted(data: bytes, size: int) -> None:
    with pytest.raises(TrustError) as caught:
        read_policy(data)
    quoted = [text for text in str(caught.value).split("'") if text.startswith("x")]
    assert quoted and set(quoted) == {"x" * size}


@pytest.mark.parametrize(
    ("record", "field"), [(FULL, "keys"), (FULL.keys[0], "roles"), (ChannelRule(), "minimum_index_version")]
)
def test_what_was_read_and_checked_cannot_be_changed(record: Any, field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(record, field, ())
