"""Keys and policies for tests, each by a name that a test can read; a name gives the same key in every process."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, derive_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from securesystemslib.signer import Signer

from cachepipe.adapters import signer
from cachepipe.adapters.store import TrustChoice
from cachepipe.domain.index import PAYLOAD_TYPE, Index, index_bytes
from cachepipe.domain.policy import DEV_PREFIX, FORMAT, Key, Policy, policy_bytes
from cachepipe.domain.trust import keyid_of


@cache
def new_key(label: str) -> signer.NewKey:
    """Returns the key of this label."""
    number = int.from_bytes(hashlib.sha256(f"a key of tests: {label}".encode()).digest(), "big") >> 1
    private = derive_private_key(number, SECP256R1())
    public = signer.public_pem(private)
    data = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return signer.NewKey(data, public, keyid_of(public))


def key(label: str, *roles: str, not_after: str = "") -> Key:
    """Returns a policy's entry for the key of this label; the role `dev` marks its id."""
    made = new_key(label)
    prefix = DEV_PREFIX if roles == ("dev",) else ""
    return Key(prefix + made.keyid, made.public, roles, not_after=not_after)


def policy(*keys: Key, **fields: object) -> Policy:
    """Returns a policy of these keys; without any, one statement key `s` and one index key `i`."""
    return Policy(FORMAT, keys or (key("s", "statement"), key("i", "index")), **fields)  # type: ignore[arg-type]


@cache
def _signer(label: str, prefix: str) -> Signer:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner, SSlibKey

    made = new_key(label)
    public = SSlibKey(prefix + made.keyid, "ecdsa", "ecdsa-sha2-nistp256", {"public": made.public})
    return CryptoSigner(load_pem_private_key(made.private, None), public)


def sealed(payload: bytes, payload_type: str, *labels: str, prefix: str = "") -> bytes:
    """Returns the envelope of a payload, signed by the keys of these labels."""
    return signer.seal(payload, payload_type, [_signer(label, prefix) for label in labels])


def sealed_index(index: Index, *labels: str) -> bytes:
    return sealed(index_bytes(index), PAYLOAD_TYPE, *(labels or ("i",)))


def write_key(folder: Path, label: str) -> str:
    """Returns the address of a key file of this label."""
    path = folder / f"{label}.key"
    if not path.exists():
        path.write_bytes(new_key(label).private)
        path.chmod(0o600)
    return f"file:{path}"


def write_policy(path: Path, chosen: Policy | None = None) -> str:
    """Returns the path of a policy file that `restore` accepts."""
    path.write_bytes(policy_bytes(chosen or policy()))
    path.chmod(0o644)
    return str(path)


def choice(
    folder: Path, chosen: Policy | None = None, statement: Iterable[str] = "s", index: Iterable[str] = "i"
) -> TrustChoice:
    """Returns the trust of a publisher with a policy file and keys of these labels."""
    folder.mkdir(parents=True, exist_ok=True)
    return TrustChoice(
        policy_file=write_policy(folder / "trust.json", chosen),
        statement_key=",".join(write_key(folder, label) for label in statement),
        index_key=",".join(write_key(folder, label) for label in index),
    )


@cache
def shared() -> TrustChoice:
    """Returns the trust of tests on stores without development keys (S3): the keys `s` and `i`, and folder stores' `d`."""
    folder = Path(tempfile.gettempdir()) / f"cachepipe-tests-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    whole = policy(key("s", "statement"), key("i", "index"), key("d", "dev"))
    for name, data in (
        ("s.key", new_key("s").private),
        ("i.key", new_key("i").private),
        ("p.json", policy_bytes(whole)),
    ):
        temporary = folder / f"{name}.{os.getpid()}"
        temporary.write_bytes(data)
        temporary.chmod(0o600)
        temporary.replace(folder / name)
    return TrustChoice(str(folder / "p.json"), False, f"file:{folder}/s.key", f"file:{folder}/i.key")


def shared_environment() -> dict[str, str]:
    """Returns `shared` as the variables of a command line."""
    chosen = shared()
    return {
        "CACHEPIPE_TRUST": chosen.policy_file,
        "CACHEPIPE_STATEMENT_KEY": chosen.statement_key,
        "CACHEPIPE_INDEX_KEY": chosen.index_key,
    }
