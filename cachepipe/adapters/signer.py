"""Keys that sign, by address: `file:PATH` (PEM, PKCS #8) or `kms:alias/…`; several, separated by commas, sign together.

Signing goes through securesystemslib (DSSE envelope, key objects); verification is `domain/trust.py`'s alone.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
)
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner, Key, SecretsHandler, Signature, Signer, SSlibKey

from cachepipe.adapters.kms import KmsKey
from cachepipe.adapters.regular_file import open_regular
from cachepipe.domain import trust
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.policy import SCHEME
from cachepipe.errors import TrustError, UsageError

FILE, KMS = "file:", "kms:"


class NewKey(NamedTuple):
    private: bytes
    """PEM, PKCS #8, not encrypted."""
    public: str
    keyid: str


class KmsSigner(Signer):
    """Signs through KMS with a client that is given. Why not securesystemslib's own: it makes its client itself."""

    def __init__(self, key: KmsKey, public_key: SSlibKey) -> None:
        self._key, self._public_key = key, public_key

    @property
    def public_key(self) -> SSlibKey:
        return self._public_key

    @classmethod
    def from_priv_key_uri(
        cls, priv_key_uri: str, public_key: Key, secrets_handler: SecretsHandler | None = None
    ) -> Signer:
        """Part of securesystemslib's interface; here `open_signer` makes signers.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"not opened this way: {priv_key_uri}")

    def sign(self, payload: bytes) -> Signature:
        return Signature(self._public_key.keyid, self._key.sign(payload).hex())

    def rehearse(self, payload: bytes) -> None:
        self._key.rehearse(payload)


def generate() -> NewKey:
    """Returns a new P-256 key."""
    private = generate_private_key(SECP256R1())
    data = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = public_pem(private)
    return NewKey(data, public, trust.keyid_of(public))


def public_pem(private: EllipticCurvePrivateKey) -> str:
    pem = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem.decode("ascii")


def open_signer(address: str, *, prefix: str = "", kms_client: Any = None) -> Signer:
    """Returns the signer at an address.

    Args:
        address: `file:PATH` or `kms:KEY`.
        prefix: put before the key's id.
        kms_client: in place of boto3's own.

    Raises:
        UsageError: another kind of address.
        TrustError: the key is absent, not private, not P-256, or KMS refuses.
    """
    if address.startswith(FILE):
        private = _read_private(Path(address.removeprefix(FILE)))
        return CryptoSigner(private, _public_key(public_pem(private), prefix))
    if address.startswith(KMS):
        key = KmsKey(address.removeprefix(KMS), kms_client)
        public = kms_public(key)
        if public is None:
            raise TrustError(f"there is no KMS key {key.key_id}", hint="`cachepipe keygen` makes it")
        return KmsSigner(key, _public_key(public, prefix))
    raise UsageError(f"not a key: `{address[:80]}`", hint="use `file:PATH` or `kms:alias/…`")


def kms_public(key: KmsKey) -> str | None:
    """Returns the public key of a KMS key in PEM; None: there is no such key.

    Raises:
        TrustError: as `KmsKey.public_key`.
    """
    found = key.public_key()
    return None if found is None else pem_of(found.der)


def pem_of(der: bytes) -> str:
    pem = load_der_public_key(der).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem.decode("ascii")


def seal(payload: bytes, payload_type: str, signers: list[Signer]) -> bytes:
    """Returns the signed envelope of a payload, in the one byte form that `domain/trust.py` reads.

    Raises:
        TrustError: a signer fails.
    """
    envelope = Envelope(payload, payload_type, {})
    for signer in signers:
        envelope.sign(signer)
    rows = [trust.Signature(keyid, bytes.fromhex(row.signature)) for keyid, row in envelope.signatures.items()]
    return trust.seal(payload, payload_type, rows)


def rehearse(payload: bytes, payload_type: str, signers: list[Signer]) -> list[str]:
    """Returns the ids of the keys that would sign; KMS is only asked whether it would, what others sign is kept nowhere.

    Raises:
        TrustError: a signer would fail.
    """
    message = trust.pae(payload_type, payload)
    for signer in signers:
        signer.rehearse(message) if isinstance(signer, KmsSigner) else signer.sign(message)
    return sorted({signer.public_key.keyid for signer in signers})


def _public_key(public: str, prefix: str) -> SSlibKey:
    return SSlibKey(prefix + trust.keyid_of(public), "ecdsa", SCHEME, {"public": public})


def _read_private(path: Path) -> EllipticCurvePrivateKey:
    try:
        handle = open_regular(path)
    except OSError as error:
        raise TrustError(
            f"the key cannot be read: {path}: {error.strerror}", hint="`cachepipe keygen` makes one"
        ) from error
    try:
        facts = os.fstat(handle)
        if facts.st_mode & 0o077:
            mode = stat.S_IMODE(facts.st_mode)
            raise TrustError(f"the key is not private: {path}: mode {mode:04o}", hint=f"chmod 0600 {path}")
        private = load_pem_private_key(os.read(handle, LIMITS.small_file_bytes), None)
    except (ValueError, TypeError, OSError) as error:
        raise TrustError(f"not a private key in PEM without password: {path}") from error
    finally:
        os.close(handle)
    if not isinstance(private, EllipticCurvePrivateKey) or not isinstance(private.curve, SECP256R1):
        raise TrustError(f"not a key of the curve P-256: {path}", hint="`cachepipe keygen` makes one")
    return private
