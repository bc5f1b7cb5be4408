"""The envelope around everything that is signed: DSSE version 1, read strictly, judged by a policy.

    {"payload":"<base64>","payloadType":"application/vnd.in-toto+json","signatures":[{"keyid":"…","sig":"<base64>"}]}

What a signature covers is not this text but its pre-authentication encoding, which frames type and payload by their lengths:

    DSSEv1 <length of type> <type> <length of payload> <payload>

An envelope has exactly one byte form (`canonical_bytes`, signatures sorted by key): every other spelling of the same content
is refused, so that its digest names its content. Everything here is a function of bytes, policy and time.

Source: secure-systems-lab/dsse, protocol.md and envelope.md, version 1.0.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING

from cachepipe.domain.index import PAYLOAD_TYPE as INDEX_PAYLOAD_TYPE
from cachepipe.domain.index import parse_timestamp
from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.policy import DEV, DEV_PREFIX, INDEX, STATEMENT, Key, Policy
from cachepipe.domain.record import Json, canonical_bytes, parse_json, sha256
from cachepipe.errors import IntegrityError, TrustError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey

STATEMENT_PAYLOAD_TYPE = "application/vnd.in-toto+json"
ROLE_OF_TYPE = {STATEMENT_PAYLOAD_TYPE: STATEMENT, INDEX_PAYLOAD_TYPE: INDEX}
TOLERANCE = timedelta(seconds=300)
"""How far clocks of signer and reader may differ before an end counts."""

_P256 = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200")
"""What stands before the point in the DER form of every P-256 public key (RFC 5480)."""
_POINT_BYTES = 65
_UNCOMPRESSED = b"\x04"
"""First byte of a point that is given by both coordinates: one key, one form, one id."""

SIGNED = "signed"
DEVELOPMENT = "development key"
PINNED = "pinned by the lock file"
UNSIGNED = "unsigned"
UNCHECKED = "unchecked signatures"

_HINT = "this image trusts other keys than those that signed: see the README's trust chapter"
_UNSIGNED_HINT = "publish it again with a key, or take the risk: `--insecure-unsigned`, which a trust policy refuses"


@dataclass(frozen=True)
class Signature:
    keyid: str
    sig: bytes
    """ECDSA, DER."""


@dataclass(frozen=True)
class Envelope:
    """A payload that nobody vouches for yet."""

    payload: bytes
    payload_type: str
    signatures: tuple[Signature, ...]


@dataclass(frozen=True)
class Verified:
    """A payload that may be parsed, and how far it is trusted."""

    payload: bytes
    status: str
    """`signed`, `development key`, `pinned by the lock file`, `unsigned` or `unchecked signatures`."""
    not_after: str
    """When the first of the keys that count ends; empty: none ends."""


def pae(payload_type: str, payload: bytes) -> bytes:
    """Returns the bytes that a signature covers; no two (type, payload) pairs share them."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def seal(payload: bytes, payload_type: str, signatures: Sequence[Signature] = ()) -> bytes:
    """Returns the envelope of a payload in its one byte form."""
    rows = [{"keyid": s.keyid, "sig": _encode(s.sig)} for s in sorted(signatures, key=lambda s: s.keyid)]
    return canonical_bytes({"payload": _encode(payload), "payloadType": payload_type, "signatures": rows})


def open_envelope(envelope: bytes, payload_type: str, what: str, limits: Limits = LIMITS) -> Envelope:
    """Returns what an envelope of the type asked for holds; its signatures are not looked at.

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
    rows = tree["signatures"]
    if not isinstance(rows, list) or not all(_is_signature(row) for row in rows):
        raise IntegrityError(what, "a signature is not `keyid` with `sig`")
    if len(rows) > limits.signatures:
        raise IntegrityError(what, "too many signatures", wanted=f"<= {limits.signatures}", found=len(rows))
    signatures = tuple(Signature(row["keyid"], _decode(row["sig"], what)) for row in rows)
    keyids = [signature.keyid for signature in signatures]
    if keyids != sorted(set(keyids)):
        raise IntegrityError(what, "a key signed twice, or signatures are not in the order of their keys")
    if seal(payload, tree["payloadType"], signatures) != envelope:
        raise IntegrityError(what, "not in canonical form")
    if tree["payloadType"] != payload_type:
        raise TrustError(f"{what}: payload type is {str(tree['payloadType'])[:80]!r}, wanted `{payload_type}`")
    return Envelope(payload, payload_type, signatures)


def verify(
    envelope: bytes, payload_type: str, what: str, policy: Policy, now: datetime | None, limits: Limits = LIMITS
) -> Verified:
    """Returns the payload of an envelope that enough of the policy's keys signed.

    Args:
        envelope: the whole text.
        payload_type: the only one that is accepted; it says which role must have signed.
        what: the object's name, for messages.
        policy: whose signatures count.
        now: ended keys do not count; None: no clock is asked, because a lock file names these very bytes.
        limits: size of the text and number of signatures.

    Raises:
        IntegrityError: as `open_envelope`.
        TrustError: unsigned, too few signatures that count, or a signature of one of the policy's keys that is not its own.
    """
    opened = open_envelope(envelope, payload_type, what, limits)
    role = ROLE_OF_TYPE[payload_type]
    _check_signatures(opened, what, policy)
    if not opened.signatures:
        raise TrustError(f"{what}: unsigned", hint=_UNSIGNED_HINT)
    counted = check_signers([signature.keyid for signature in opened.signatures], role, what, policy, now)
    own = [key for key in counted if DEV not in key.roles]
    status = SIGNED if len(own) >= policy.threshold(role) else DEVELOPMENT
    ends = sorted(key.not_after for key in counted if key.not_after)
    return Verified(opened.payload, status, ends[0] if ends else "")


def accept_unsigned(
    envelope: bytes, payload_type: str, what: str, policy: Policy, now: datetime | None, limits: Limits = LIMITS
) -> Verified:
    """As `verify`, but takes what is not signed by enough of the policy's keys, and says so in the status.

    Raises:
        IntegrityError: as `open_envelope`.
        TrustError: a signature of one of the policy's keys that is not its own.
    """
    opened = open_envelope(envelope, payload_type, what, limits)
    role = ROLE_OF_TYPE[payload_type]
    _check_signatures(opened, what, policy)
    counted, _ = _counted([signature.keyid for signature in opened.signatures], role, policy, now)
    if len(counted) >= policy.threshold(role):
        return verify(envelope, payload_type, what, policy, now, limits)
    return Verified(opened.payload, UNCHECKED if opened.signatures else UNSIGNED, "")


def accept_pinned(envelope: bytes, payload_type: str, what: str, limits: Limits = LIMITS) -> Verified:
    """Returns the payload of a signed envelope whose digest a lock file names, where no policy says whose signatures count.

    Raises:
        IntegrityError: as `open_envelope`.
        TrustError: unsigned.
    """
    opened = open_envelope(envelope, payload_type, what, limits)
    if not opened.signatures:
        raise TrustError(f"{what}: unsigned", hint=_UNSIGNED_HINT)
    return Verified(opened.payload, PINNED, "")


def check_signers(keyids: Sequence[str], role: str, what: str, policy: Policy, now: datetime | None) -> Sequence[Key]:
    """Returns the keys of a policy that count in a role.

    Args:
        keyids: of those who signed, or would; none twice.
        role: in which.
        what: the object's name, for messages.
        policy: whose signatures count.
        now: as `verify`.

    Raises:
        TrustError: too few of them count.
    """
    counted, reasons = _counted(keyids, role, policy, now)
    wanted = policy.threshold(role)
    if len(counted) < wanted:
        why = "".join(f"; {reason}" for reason in reasons)
        raise TrustError(f"{what}: {len(counted)} of {wanted} {role} signatures count{why}", hint=_HINT)
    return counted


def _check_signatures(opened: Envelope, what: str, policy: Policy) -> None:
    keys = {key.keyid: key for key in policy.keys}
    message = pae(opened.payload_type, opened.payload)
    for signature in opened.signatures:
        key = keys.get(signature.keyid)
        if key is not None and not is_signed_by(key, signature.sig, message):
            raise TrustError(f"{what}: the signature of key {key.keyid[:20]} is not of these bytes", hint=_HINT)


def _counted(keyids: Sequence[str], role: str, policy: Policy, now: datetime | None) -> tuple[list[Key], list[str]]:
    """Returns the keys whose signatures count, and why others do not. Ids are unique in both, so no key counts twice."""
    keys = {key.keyid: key for key in policy.keys}
    counted: list[Key] = []
    reasons: list[str] = []
    for keyid in keyids:
        key = keys.get(keyid)
        if key is None:
            kind = "a development key" if keyid.startswith(DEV_PREFIX) else "a key"
            reasons.append(f"by {kind} that the policy does not list: {keyid[:20]!r}")
        elif not key.has_role(role):
            reasons.append(f"key {keyid[:20]} may not sign as {role}")
        elif now is not None and key.not_after and now - TOLERANCE > parse_timestamp(key.not_after, "not_after"):
            reasons.append(f"key {keyid[:20]} ended at {key.not_after}")
        else:
            counted.append(key)
    return counted, reasons


def is_signed_by(key: Key, sig: bytes, message: bytes) -> bool:
    """Tells whether a signature is that of a key, which `check_keys` would pass, over a message (`pae`)."""
    from cryptography.exceptions import InvalidSignature

    try:
        _public_key(key).verify(sig, message, _algorithm())
    except InvalidSignature:
        return False
    return True


def _algorithm() -> ECDSA:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    class Sha256(ECDSA):
        """ECDSA's own constructor imports ciphers and RSA, 5 ms of a restore, to ask about signing without chance."""

        algorithm = SHA256()

        def __init__(self) -> None:
            pass

    return Sha256()


def check_keys(policy: Policy) -> Policy:
    """Returns the policy, every key of which is a P-256 public key under its own id.

    Raises:
        TrustError: one is not.
    """
    for key in policy.keys:
        _public_key(key)
    return policy


def keyid_of(public: str) -> str:
    """Returns the id of a public key: the SHA-256 of its DER form.

    Raises:
        TrustError: not a P-256 public key in PEM.
    """
    return _load(public)[1]


def _public_key(key: Key) -> EllipticCurvePublicKey:
    public, keyid = _load(key.public)
    if key.keyid.removeprefix(DEV_PREFIX) != keyid:
        raise TrustError(f"trust policy: key {key.keyid[:20]} has the public key of {keyid[:20]}")
    return public


@lru_cache(maxsize=32)
def _load(public: str) -> tuple[EllipticCurvePublicKey, str]:
    # cryptography's own PEM reader imports SSH and RSA with it, 10 ms of a restore; a P-256 key has one DER form.
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey

    lines = public.strip().splitlines()
    if len(lines) < 3 or (lines[0], lines[-1]) != ("-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"):
        raise TrustError("trust policy: a public key is not PEM")
    try:
        der = _decode("".join(lines[1:-1]), "public key")
        point = der[len(_P256) :]
        if not der.startswith(_P256) or len(point) != _POINT_BYTES or not point.startswith(_UNCOMPRESSED):
            raise TrustError("trust policy: a public key is not of the curve P-256, uncompressed")
        key = EllipticCurvePublicKey.from_encoded_point(SECP256R1(), point)
    except (IntegrityError, ValueError) as error:
        raise TrustError("trust policy: a public key is not a point of P-256 in base64") from error
    return key, sha256(der)


def _is_signature(tree: Json) -> bool:
    return (
        isinstance(tree, dict)
        and set(tree) == {"keyid", "sig"}
        and all(isinstance(text, str) for text in tree.values())
    )


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: Json, what: str) -> bytes:
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True) if isinstance(text, str) else None
    except (ValueError, binascii.Error):
        data = None
    # the comparison refuses unused bits in the last character: one payload, one text
    if data is None or _encode(data) != text:
        raise IntegrityError(what, "not strict base64")
    return data
