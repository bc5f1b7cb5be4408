"""Keys and policies for tests: made once per process, each by a name that a test can read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from securesystemslib.signer import Signer

from cachepipe.adapters import signer
from cachepipe.adapters.store import TrustChoice
from cachepipe.domain.index import PAYLOAD_TYPE, Index, index_bytes
from cachepipe.domain.policy import DEV_PREFIX, FORMAT, Key, Policy, policy_bytes


@cache
def new_key(label: str) -> signer.NewKey:
    """Returns the key of this label; the same one for the whole process."""
    return signer.generate()


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
