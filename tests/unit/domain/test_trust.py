"""An envelope has one byte form; everything else is refused before its payload is read."""

from __future__ import annotations

import base64
import json
from dataclasses import FrozenInstanceError, replace
from datetime import datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain import trust
from cachepipe.domain.index import PAYLOAD_TYPE
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.policy import Policy
from cachepipe.domain.record import canonical_bytes, sha256
from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE, open_envelope, pae, seal
from cachepipe.errors import IntegrityError, TrustError
from tests.support import authority
from tests.support.artifacts import NOW


def envelope_of(**changes: object) -> bytes:
    tree = json.loads(seal(b'{"a":1}\n', "t"))
    return canonical_bytes({**tree, **changes})


def signature(keyid: object = "k", sig: object = "c2ln") -> dict[str, object]:
    return {"keyid": keyid, "sig": sig}


@given(st.binary(max_size=200), st.text(max_size=20))
def test_what_was_sealed_is_what_comes_out(payload: bytes, payload_type: str) -> None:
    assert open_envelope(seal(payload, payload_type), payload_type, "x").payload == payload


def test_the_pre_authentication_encoding_is_that_of_the_specification() -> None:
    assert pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


@given(st.text(max_size=9), st.binary(max_size=9), st.text(max_size=9), st.binary(max_size=9))
def test_no_two_pairs_share_a_pre_authentication_encoding(t1: str, p1: bytes, t2: str, p2: bytes) -> None:
    assert (pae(t1, p1) == pae(t2, p2)) == ((t1, p1) == (t2, p2))


def test_another_payload_type_is_refused() -> None:
    with pytest.raises(TrustError):
        open_envelope(seal(b"x", PAYLOAD_TYPE), STATEMENT_PAYLOAD_TYPE, "x")


@pytest.mark.parametrize(
    "envelope",
    [
        b"",
        b"[]\n",
        b"{}\n",
        seal(b"x", "t").rstrip(b"\n"),
        seal(b"x", "t") + b"\n",
        seal(b"x", "t") + seal(b"x", "t"),
        b" " + seal(b"x", "t"),
        seal(b"x", "t").replace(b'":"', b'": "'),
        envelope_of(extra=1),
        envelope_of(payload=None),
        envelope_of(payload=["YQ=="]),
        envelope_of(payload="YQ"),
        envelope_of(payload="YR=="),
        envelope_of(payload="Y Q=="),
        envelope_of(payload="YQ==\n"),
        envelope_of(payload="-_-_"),
        envelope_of(payload="é"),
        envelope_of(payloadType=None),
        envelope_of(payloadType=["t"]),
        envelope_of(signatures=None),
        envelope_of(signatures={}),
        envelope_of(signatures=["s"]),
        envelope_of(signatures=[{"sig": "c2ln"}]),
        envelope_of(signatures=[{**signature(), "alg": "none"}]),
        envelope_of(signatures=[signature(keyid=1)]),
        envelope_of(signatures=[signature(sig=None)]),
        envelope_of(signatures=[signature(sig="no base64")]),
        envelope_of(signatures=[signature()] * (LIMITS.signatures + 1)),
        b'{"payload":"YQ==","payload":"YQ==","payloadType":"t","signatures":[]}\n',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_every_other_form_is_refused(envelope: bytes) -> None:
    with pytest.raises((IntegrityError, TrustError)):
        open_envelope(envelope, "t", "x")


def test_an_envelope_beyond_the_limit_is_refused_unread() -> None:
    with pytest.raises(IntegrityError, match="too long"):
        open_envelope(b" " * (LIMITS.index_bytes + 1), "t", "x")


# --- keys ------------------------------------------------------------------------------------------------------------------


def pem(data: bytes) -> str:
    body = base64.b64encode(data).decode()
    lines = [body[at : at + 64] for at in range(0, len(body), 64)]
    return "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""])


def der(label: str = "s") -> bytes:
    return base64.b64decode("".join(authority.new_key(label).public.strip().splitlines()[1:-1]))


def test_a_keys_id_is_the_digest_of_its_der_form_however_the_lines_are_cut() -> None:
    made = authority.new_key("s")
    assert trust.keyid_of(made.public) == made.keyid == sha256(der())
    one_line = f"\n-----BEGIN PUBLIC KEY-----\n{base64.b64encode(der()).decode()}\n-----END PUBLIC KEY-----"
    assert trust.keyid_of(one_line) == made.keyid


def test_other_libraries_read_the_same_key() -> None:
    key = load_pem_public_key(authority.new_key("s").public.encode())
    assert trust.keyid_of(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()) == sha256(der())


P384 = ec.generate_private_key(ec.SECP384R1()).public_key()
COMPRESSED = (
    ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
)


@pytest.mark.parametrize(
    ("public", "message"),
    [
        ("", "is not PEM"),
        ("-----BEGIN PUBLIC KEY-----", "is not PEM"),
        ("-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----", "is not PEM"),
        (pem(der()).replace("BEGIN", "BEGUN"), "is not PEM"),
        (pem(der()).replace("END", "AND"), "is not PEM"),
        (pem(der()).replace("PUBLIC", "PRIVATE"), "is not PEM"),
        (pem(der()).replace("M", "!", 1), "not a point of P-256 in base64"),
        (pem(b""), "is not PEM"),
        (pem(b"\0" * 91), "not of the curve P-256"),
        (pem(der()[:-1]), "not of the curve P-256"),
        (pem(der() + b"\0"), "not of the curve P-256"),
        (pem(der()[:26] + b"\x06" + der()[27:]), "not of the curve P-256"),
        (pem(der()[:26] + b"\x04" + b"\1" * 64), "not a point of P-256"),
        (pem(der()[:26] + COMPRESSED), "not of the curve P-256"),
        (pem(der()[26:]), "not of the curve P-256"),
        (P384.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(), "not of the curve P-256"),
    ],
)
def test_what_is_no_p256_key_in_its_one_form_is_refused(public: str, message: str) -> None:
    with pytest.raises(TrustError) as caught:
        trust.keyid_of(public)
    assert message in str(caught.value)


@pytest.mark.parametrize(("label", "other"), [("s", "i"), ("i", "s")])
def test_a_key_under_another_keys_id_is_refused_by_both_ids(label: str, other: str) -> None:
    whole = authority.policy(replace(authority.key(label, "statement"), keyid=authority.new_key(other).keyid))
    with pytest.raises(TrustError) as caught:
        trust.check_keys(whole)
    ids = [authority.new_key(name).keyid[:20] for name in (other, label)]
    assert str(caught.value) == f"trust policy: key {ids[0]} has the public key of {ids[1]}"


# --- what is said --------------------------------------------------------------------------------------------------------


def verdict(envelope: bytes, policy: Policy, now: datetime | None = NOW) -> str:
    with pytest.raises(TrustError) as caught:
        trust.verify(envelope, PAYLOAD_TYPE, "index x", policy, now)
    return str(caught.value)


def test_the_reasons_name_each_key_by_the_same_twenty_digits() -> None:
    i, s, d = (authority.new_key(label).keyid for label in ("i", "s", "d"))
    envelope = authority.sealed(b"x", PAYLOAD_TYPE, "i", "s", "stranger")
    ended = authority.policy(
        authority.key("i", "index", not_after="2026-11-01T00:00:00Z"), authority.key("s", "statement")
    )
    told = verdict(envelope, ended)
    assert told.startswith("index x: 0 of 1 index signatures count; ")
    assert set(told.split("; ")[1:]) == {
        f"key {i[:20]} ended at 2026-11-01T00:00:00Z",
        f"key {s[:20]} may not sign as index",
        f"by a key that the policy does not list: {authority.new_key('stranger').keyid[:20]!r}",
    }
    development = authority.sealed(b"x", PAYLOAD_TYPE, "d", prefix="dev-")
    wanted = f"index x: 0 of 1 index signatures count; by a development key that the policy does not list: {('dev-' + d)[:20]!r}"
    assert verdict(development, ended) == wanted


def test_a_signature_that_is_not_its_keys_own_is_named() -> None:
    tree = json.loads(authority.sealed(b"x", PAYLOAD_TYPE, "s"))
    tree["signatures"][0]["keyid"] = authority.new_key("i").keyid
    assert verdict(canonical_bytes(tree), authority.policy()) == (
        f"index x: the signature of key {authority.new_key('i').keyid[:20]} is not of these bytes"
    )


def test_the_payload_type_is_quoted_up_to_eighty_characters() -> None:
    with pytest.raises(TrustError) as caught:
        open_envelope(seal(b"x", "t" * 200), PAYLOAD_TYPE, "x")
    assert str(caught.value) == f"x: payload type is {'t' * 80!r}, wanted `{PAYLOAD_TYPE}`"


def test_the_status_says_what_the_threshold_was_reached_with() -> None:
    dev, own = authority.key("d", "dev"), authority.key("i", "index")
    mixed = authority.sealed(b"x", PAYLOAD_TYPE, "i")
    assert trust.verify(mixed, PAYLOAD_TYPE, "x", authority.policy(dev, own), NOW).status == "signed"
    more = authority.sealed(b"x", PAYLOAD_TYPE, "i", "i2")
    two = authority.policy(dev, own, authority.key("i2", "index"))
    assert trust.verify(more, PAYLOAD_TYPE, "x", two, NOW).status == "signed"
    alone = authority.sealed(b"x", PAYLOAD_TYPE, "d", prefix="dev-")
    assert trust.verify(alone, PAYLOAD_TYPE, "x", authority.policy(dev, own), NOW).status == "development key"


def test_the_earliest_end_of_the_keys_that_count_is_told() -> None:
    early, late = "2027-01-01T00:00:00Z", "2028-01-01T00:00:00Z"
    two = authority.policy(authority.key("i", "index", not_after=late), authority.key("i2", "index", not_after=early))
    envelope = authority.sealed(b"x", PAYLOAD_TYPE, "i", "i2")
    assert trust.verify(envelope, PAYLOAD_TYPE, "x", two, NOW).not_after == early
    one = authority.policy(authority.key("i", "index"), authority.key("i2", "index", not_after=early))
    assert trust.verify(envelope, PAYLOAD_TYPE, "x", one, NOW).not_after == early
    none = authority.policy(authority.key("i", "index"))
    assert trust.verify(envelope, PAYLOAD_TYPE, "x", none, NOW).not_after == ""


def test_accept_unsigned_still_tells_signed_from_unsigned_and_refuses_a_false_signature() -> None:
    judge, kind = authority.policy(), PAYLOAD_TYPE
    found = trust.accept_unsigned(authority.sealed(b"x", kind, "i"), kind, "x", judge, NOW)
    two = authority.policy(authority.key("i", "index"), authority.key("i2", "index"))
    assert trust.accept_unsigned(authority.sealed(b"x", kind, "i", "i2"), kind, "x", two, NOW).status == "signed"
    assert (found.payload, found.status) == (b"x", "signed")
    for envelope, status in (
        (seal(b"y", kind), "unsigned"),
        (authority.sealed(b"y", kind, "stranger"), "unchecked signatures"),
    ):
        found = trust.accept_unsigned(envelope, kind, "x", judge, NOW)
        assert (found.payload, found.status, found.not_after) == (b"y", status, "")
    tree = json.loads(authority.sealed(b"x", kind, "stranger"))
    for label in ("i", "s"):  # the second would not count for an index
        tree["signatures"][0]["keyid"] = authority.new_key(label).keyid
        with pytest.raises(TrustError, match="is not of these bytes"):
            trust.accept_unsigned(canonical_bytes(tree), kind, "x", judge, NOW)


def test_who_would_sign_is_judged_as_who_signed() -> None:
    judge = authority.policy(
        authority.key("s", "statement"), authority.key("i", "index", not_after="2026-11-30T09:00:00Z")
    )
    keyids = {label: authority.new_key(label).keyid for label in ("s", "i", "stranger")}
    before = NOW - timedelta(hours=2)
    assert [key.keyid for key in trust.check_signers([keyids["i"]], "index", "x", judge, before)] == [keyids["i"]]
    for label, now, told in (
        ("i", NOW, "ended at 2026-11-30T09:00:00Z"),
        ("s", before, "may not sign as index"),
        ("stranger", before, "that the policy does not list"),
    ):
        with pytest.raises(TrustError, match=told) as caught:
            trust.check_signers([keyids[label]], "index", "x", judge, now)
        with pytest.raises(TrustError) as signed:
            trust.verify(authority.sealed(b"x", PAYLOAD_TYPE, label), PAYLOAD_TYPE, "x", judge, now)
        assert (str(caught.value), caught.value.hint) == (str(signed.value), signed.value.hint)


def test_accept_pinned_wants_a_signature_and_looks_at_none() -> None:
    found = trust.accept_pinned(authority.sealed(b"x", PAYLOAD_TYPE, "stranger"), PAYLOAD_TYPE, "x")
    assert (found.payload, found.status, found.not_after) == (b"x", "pinned by the lock file", "")
    with pytest.raises(TrustError, match="x: unsigned"):
        trust.accept_pinned(seal(b"x", PAYLOAD_TYPE), PAYLOAD_TYPE, "x")


@pytest.mark.parametrize(
    ("envelope", "problem"),
    [
        (envelope_of(extra=1), "not a DSSE envelope"),
        (b"[]", "not a DSSE envelope"),
        (b'{"payload":"YQ=="}', "not a DSSE envelope"),
        (envelope_of(signatures=[{**signature(), "alg": "none"}]), "a signature is not `keyid` with `sig`"),
        (envelope_of(signatures=[signature(sig="no base64")]), "not strict base64"),
        (envelope_of(payload="YR=="), "not strict base64"),
        (envelope_of(signatures=[signature("a"), signature("a")]), "a key signed twice"),
        (envelope_of(signatures=[signature("a"), signature("a"), signature("b")]), "a key signed twice"),
        (envelope_of(signatures=[signature("b"), signature("a")]), "not in the order of their keys"),
        (envelope_of(signatures=[signature("a"), signature("c"), signature("b")]), "not in the order of their keys"),
        (seal(b"x", "t") + b" ", "not in canonical form"),
    ],
)
def test_what_is_wrong_with_an_envelope_is_said(envelope: bytes, problem: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        open_envelope(envelope, "t", "index x")
    assert str(caught.value).startswith("index x: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(("found", "wanted"), [("a", "b"), ("b", "a")])
def test_a_payload_type_before_or_after_the_one_wanted_is_refused(found: str, wanted: str) -> None:
    with pytest.raises(TrustError, match="payload type"):
        open_envelope(seal(b"x", found), wanted, "x")


def test_eight_signatures_are_read_and_nine_are_not() -> None:
    eight = [trust.Signature(f"k{number}", b"s") for number in range(LIMITS.signatures)]
    assert len(open_envelope(seal(b"x", "t", eight), "t", "x").signatures) == 8
    with pytest.raises(IntegrityError, match="too many signatures: wanted <= 8, found 9"):
        open_envelope(seal(b"x", "t", [*eight, trust.Signature("k9", b"s")]), "t", "x")


def test_the_longest_text_that_is_read_is_the_larger_of_both_limits() -> None:
    limits = replace(LIMITS, index_bytes=100, statement_bytes=300)
    fits, long = seal(b"x" * 100, "t"), seal(b"x" * 200, "t")
    assert len(fits) < 300 < len(long)
    for chosen in (limits, replace(limits, index_bytes=300, statement_bytes=100)):
        assert open_envelope(fits, "t", "x", chosen).payload == b"x" * 100
        with pytest.raises(IntegrityError, match="too long: wanted <= 300 bytes"):
            open_envelope(long, "t", "x", chosen)


@pytest.mark.parametrize(
    "found",
    [
        trust.Signature("k", b"s"),
        trust.Envelope(b"x", "t", ()),
        trust.Verified(b"x", "signed", ""),
    ],
    ids=["signature", "envelope", "verdict"],
)
def test_what_was_judged_cannot_be_changed_afterwards(found: object) -> None:
    for name in vars(found):
        with pytest.raises(FrozenInstanceError):
            setattr(found, name, "other")
