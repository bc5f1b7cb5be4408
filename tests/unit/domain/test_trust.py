"""An envelope has one byte form; everything else is refused before its payload is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain.index import PAYLOAD_TYPE
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.record import canonical_bytes
from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE, open_envelope, pae, seal
from cachepipe.errors import IntegrityError, TrustError


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
