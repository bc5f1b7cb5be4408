"""Making keys, and the policy file that says what they may sign.

1 the key: a new file (0600), or one in KMS, made there when its alias does not exist yet
2 the policy: the public half with its role, added beside what is there; the file is replaced whole
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cachepipe.adapters import signer
from cachepipe.adapters.folders import lock_file
from cachepipe.adapters.kms import KmsKey
from cachepipe.adapters.regular_file import read_regular
from cachepipe.domain import policy as policies
from cachepipe.domain.index import parse_timestamp
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.policy import Key, Policy, policy_bytes, read_policy
from cachepipe.domain.record import canonical_bytes, parse_json
from cachepipe.domain.trust import check_keys, keyid_of
from cachepipe.errors import IntegrityError, UnsafePathError, UsageError


@dataclass(frozen=True)
class KeyRequest:
    """The options of `cachepipe keygen`."""

    key: str
    """`file:PATH`, a bare path, or `kms:KEY`."""
    roles: Sequence[str]
    policy: Path
    not_after: str = ""
    """RFC 3339, UTC; empty: the end that the policy has for this key, or none."""


def keygen(request: KeyRequest, kms_client: Any = None) -> Key:
    """Returns the key that the policy file now lists; one that exists is listed, never replaced.

    Args:
        request: the options.
        kms_client: in place of boto3's own.

    Raises:
        UsageError: no role, or an end that is no time.
        TrustError: the policy file has problems, KMS refuses, or an existing key file is not private.
        UnsafePathError: a file cannot be written.
    """
    if not request.roles:
        raise UsageError("no role is given", hint="`--role statement`, `--role index`, or both")
    try:
        _ = parse_timestamp(request.not_after, "--not-after") if request.not_after else None
    except IntegrityError as error:
        raise UsageError(str(error), hint="a time is written 2027-03-01T00:00:00Z, in UTC") from error
    load_policy(request.policy)  # before a key is made
    # 1
    public = _kms_public(request.key, kms_client) if request.key.startswith(signer.KMS) else _file_public(request.key)
    # 2
    with _alone(request.policy):
        policy, keyid = load_policy(request.policy), keyid_of(public)
        earlier = [key for key in policy.keys if key.keyid == keyid]
        roles = {*request.roles, *(role for key in earlier for role in key.roles)}
        ends = request.not_after or "".join(
            key.not_after for key in earlier
        )  # another role is no reason to live longer
        key = Key(keyid, public, tuple(sorted(roles)), policies.SCHEME, ends)
        others = tuple(key for key in policy.keys if key.keyid != keyid)
        save_policy(request.policy, replace(policy, keys=(*others, key)))
    return key


def retire(path: Path, prefix: str) -> Key:
    """Returns the key that the policy file no longer lists.

    Args:
        path: of the policy file.
        prefix: of the key's id, 8 digits or more, that fits one key alone.

    Raises:
        UsageError: it fits none or several.
        TrustError: the policy file has problems, or would have: a threshold that can no longer be reached.
        UnsafePathError: the file cannot be written.
    """
    with _alone(path):
        policy = load_policy(path)
        found = [key for key in policy.keys if key.keyid.startswith(prefix)]
        if len(prefix) < 8 or len(found) != 1:
            what = f"{len(found)} keys of {path} begin with `{prefix}`"
            raise UsageError(what, hint="give more digits of the key's id")
        save_policy(path, replace(policy, keys=tuple(key for key in policy.keys if key not in found)))
    return found[0]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds a lock of the policy's folder, since the file itself is replaced: of two at once each adds to what the other wrote."""
    try:
        folder = os.open(os.path.dirname(os.path.realpath(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # what cannot be opened is named by who writes there
        return
    try:
        with suppress(OSError):  # a file system without locks
            lock_file(folder, lambda: None)
        yield
    finally:
        os.close(folder)


def load_policy(path: Path) -> Policy:
    """Returns the policy in a file, an empty one if there is no file yet.

    Raises:
        TrustError: it is not one.
        UsageError: it cannot be read.
    """
    try:
        return check_keys(read_policy(read_regular(path, LIMITS.small_file_bytes), str(path)))
    except FileNotFoundError:
        return Policy(policies.FORMAT, ())
    except OSError as error:
        raise UsageError(f"the policy cannot be read: {path}: {error.strerror}") from error


def save_policy(path: Path, policy: Policy) -> None:
    """Writes a policy for people and for git: one field a line, 0644, whole or not at all.

    Raises:
        TrustError: it would not be accepted.
        UnsafePathError: the file cannot be written.
    """
    import json

    check_keys(read_policy(policy_bytes(policy), str(path)))
    tree = parse_json(policy_bytes(policy), str(path), len(policy_bytes(policy)))
    text = json.dumps(tree, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
    assert canonical_bytes(tree) == policy_bytes(policy)
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    _write_new(temporary, text.encode(), 0o644)
    try:
        temporary.replace(os.path.realpath(path))
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UnsafePathError(
            path, f"cannot be written ({error.strerror})", hint="name a file that you can write"
        ) from error


def _file_public(address: str) -> str:
    path = Path(address.removeprefix(signer.FILE))
    if not os.path.lexists(path):
        _write_new(path, signer.generate().private, 0o600)
    key = signer.open_signer(f"{signer.FILE}{path}").public_key
    return str(key.to_dict()["keyval"]["public"])


def _kms_public(address: str, client: Any) -> str:
    key = KmsKey(address.removeprefix(signer.KMS), client)
    public = signer.kms_public(key)
    if public is None:
        key.create()
        public = signer.kms_public(key)
    assert public is not None
    return public


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(handle, mode)
                file.write(data)
                file.flush()
                os.fsync(handle)
        except OSError:
            path.unlink(missing_ok=True)  # half a key would be taken for one by the next run
            raise
    except OSError as error:
        raise UnsafePathError(
            path, f"cannot be written ({error.strerror})", hint="name a file that you can write"
        ) from error
