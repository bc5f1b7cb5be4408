"""Development keys: what signs in a folder store (`file://`) for which nobody named keys.

    <store>/.keys/dev.key                0600, made by the first publisher
    <store>/.keys/dev-<sha256>.pub       0644, what readers of this store accept when they have no trust policy

They prove that what is read was published by someone who could read the private key, the folder's owner that is. They
are no defence against the owner, and a trust policy that does not list their role `dev` refuses them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from cachepipe.adapters.regular_file import open_regular
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.policy import DEV, DEV_PREFIX, FORMAT, Key, Policy
from cachepipe.errors import TrustError

FOLDER = ".keys"
PRIVATE = "dev.key"


def dev_policy(root: str) -> Policy:
    """Returns the policy of a folder store without a trust policy: its development keys, which may sign as anyone.

    Raises:
        TrustError: a key file that others than root, us and the store's owner could have put there.
    """
    folder = os.path.join(root, FOLDER)
    try:
        owners = {0, os.geteuid(), os.stat(root).st_uid}
        names = sorted(name for name in os.listdir(folder) if name.startswith(DEV_PREFIX) and name.endswith(".pub"))
    except OSError:
        return Policy(FORMAT, ())
    try:
        _check_owner(folder, os.lstat(folder), owners)
        keys = [
            Key(name.removesuffix(".pub"), _read_public(os.path.join(folder, name), owners), (DEV,))
            for name in names[: LIMITS.signatures]
        ]
    except OSError as error:
        raise TrustError(f"a development key cannot be read: {error.filename}: {error.strerror}") from error
    return Policy(FORMAT, tuple(keys))


def _read_public(path: str, owners: set[int]) -> str:
    handle = open_regular(path, follows_links=False)
    try:
        _check_owner(path, os.fstat(handle), owners)
        return os.read(handle, LIMITS.small_file_bytes).decode("ascii", errors="replace")
    finally:
        os.close(handle)


def _check_owner(path: str, facts: os.stat_result, owners: set[int]) -> None:
    is_plain = stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)
    if facts.st_uid not in owners or facts.st_mode & 0o022 or not is_plain:
        raise TrustError(
            f"a development key that others could have put there: {path}",
            hint="look who wrote there; for a store that several users write, make keys with `cachepipe keygen`",
        )


def dev_key(root: str, make: Callable[[], tuple[bytes, str, str]]) -> tuple[str, bool]:
    """Returns the path of a folder store's private development key, and whether this call made it.

    Args:
        root: of the store; created if it does not exist.
        make: gives a new key: private PEM, public PEM, id.

    Raises:
        TrustError: it is not ours to read, others can read it, or it cannot be made.
    """
    folder = os.path.join(root, FOLDER)
    path = os.path.join(folder, PRIVATE)
    try:
        os.makedirs(folder, 0o755, exist_ok=True)
        is_new = not os.path.lexists(path) and _create(folder, path, *make())
        facts = os.lstat(path)
    except OSError as error:
        raise TrustError(
            f"no development key can be made: {path}: {error.strerror}",
            hint="name keys: `--statement-key` and `--index-key`; `cachepipe keygen` makes them",
        ) from error
    if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077 or facts.st_uid not in (0, os.geteuid()):
        raise TrustError(
            f"the development key is not private: {path}: owner uid {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}",
            hint="publish as the user that made it, or name keys: `--statement-key` and `--index-key`",
        )
    return path, is_new


def adopt_keys(source: str, target: str) -> None:
    """Has the folder store `target` believe the development keys of `source`: what is copied there keeps its signatures.

    Raises:
        TrustError: a key of `source` is not safe, or one cannot be written.
    """
    folder = os.path.join(target, FOLDER)
    try:
        for key in dev_policy(source).keys:
            os.makedirs(folder, 0o755, exist_ok=True)
            path = os.path.join(folder, f"{key.keyid}.pub")
            if not os.path.lexists(path):
                _write(path, key.public.encode(), 0o644)
    except OSError as error:
        raise TrustError(f"no development key can be written: {folder}: {error.strerror}") from error


def _create(folder: str, path: str, private: bytes, public: str, keyid: str) -> bool:
    """Puts a key pair in place; of several publishers at once one wins. The public half comes first: a kill leaves no key without it."""
    _write(os.path.join(folder, f"{DEV_PREFIX}{keyid}.pub"), public.encode(), 0o644)
    temporary = f"{path}.{os.urandom(6).hex()}"
    _write(temporary, private, 0o600)
    try:
        os.link(temporary, path)
    except FileExistsError:
        os.unlink(os.path.join(folder, f"{DEV_PREFIX}{keyid}.pub"))
        return False
    finally:
        os.unlink(temporary)
    return True


def _write(path: str, data: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, mode)
        file.write(data)
        file.flush()
        os.fsync(handle)
