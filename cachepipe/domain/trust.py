"""The envelope around everything that is signed: DSSE version 1, read strictly.

    {"payload":"<base64>","payloadType":"application/vnd.in-toto+json","signatures":[{"keyid":"…","sig":"<base64>"}]}

What a signature covers is not this text but its pre-authentication encoding, which frames type and payload by their lengths:

    DSSEv1 <length of type> <type> <length of payload> <payload>

An envelope has exactly one byte form (`canonical_bytes`): every other spelling of the same content is refused, so that its
digest names its content. This release has no trust policy: it says `unsigned`, or `unchecked signatures`.

Source: secure-systems-lab/dsse, protocol.md and envelope.md, version 1.0.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.record import Json, canonical_bytes, parse_json
from cachepipe.errors import IntegrityError, TrustError

STATEMENT_PAYLOAD_TYPE = "application/vnd.in-toto+json"

UNSIGNED = "unsigned"
UNCHECKED = "unchecked signatures"


@dataclass(frozen=True)
class Verified:
    """A payload that may be parsed, and how far it is trusted."""

    payload: bytes
    status: str
    """`unsigned` or `unchecked signatures`."""


def pae(payload_type: str, payload: bytes) -> bytes:
    """Returns the bytes that a signature covers; no two (type, payload) pairs share them."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def seal(payload: bytes, payload_type: str) -> bytes:
    """Returns the envelope of a payload in its one byte form, without signatures."""
    text = base64.b64encode(payload).decode("ascii")
    return canonical_bytes({"payload": text, "payloadType": payload_type, "signatures": []})


def verify(envelope: bytes, payload_type: str, what: str, limits: Limits = LIMITS) -> Verified:
    """Returns the payload of an envelope of the type asked for.

    Args:
        envelope: the whole text; the caller compared its digest where one is known.
        payload_type: the only one that is accepted.
        what: the object's name, for messages.
        limits: size of the text and number of signatures.

    Raises:
        IntegrityError: not the one byte form of a DSSE envelope, too long, too many signatures.
        TrustError: another payload type.
    """
    tree = parse_json(envelope, what, max(limits.index_bytes, limits.statement_bytes))
    if not isinstance(tree, dict) or set(tree) != {"payload", "payloadType", "signatures"}:
        raise IntegrityError(what, "not a DSSE envelope")
    payload = _decode(tree["payload"], what)
    signatures = tree["signatures"]
    if not isinstance(signatures, list) or not all(_is_signature(signature) for signature in signatures):
        raise IntegrityError(what, "a signature is not `keyid` with `sig`")
    if len(signatures) > limits.signatures:
        raise IntegrityError(what, "too many signatures", wanted=f"<= {limits.signatures}", found=len(signatures))
    for signature in signatures:
        _decode(signature["sig"], what)
    if canonical_bytes(tree) != envelope:
        raise IntegrityError(what, "not in canonical form")
    if tree["payloadType"] != payload_type:
        raise TrustError(f"{what}: payload type is {str(tree['payloadType'])[:80]!r}, wanted `{payload_type}`")
    return Verified(payload, UNCHECKED if signatures else UNSIGNED)


def _is_signature(tree: Json) -> bool:
    return (
        isinstance(tree, dict)
        and set(tree) == {"keyid", "sig"}
        and all(isinstance(text, str) for text in tree.values())
    )


def _decode(text: Json, what: str) -> bytes:
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True) if isinstance(text, str) else None
    except (ValueError, binascii.Error):
        data = None
    # the comparison refuses unused bits in the last character: one payload, one text
    if data is None or base64.b64encode(data).decode("ascii") != text:
        raise IntegrityError(what, "not strict base64")
    return data
