"""What cachepipe asks of a store: the promises of S3, in words. One suite (tests/contract) holds every store to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from cachepipe.errors import StoreError

if TYPE_CHECKING:
    from cachepipe.adapters.store_trust import StoreTrust

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*", re.ASCII)


@dataclass(frozen=True)
class TrustChoice:
    """What a command line says about trust."""

    policy_file: str = ""
    """Empty: `/etc/cachepipe/trust.json`, if it exists."""
    accepts_unsigned: bool = False
    statement_key: str = ""
    """`file:PATH` or `kms:KEY`, several separated by commas."""
    index_key: str = ""


NO_CHOICE = TrustChoice()


class Trusting:
    """What every kind of store has beside its objects: the trust under which it is used. Made when it is first asked for."""

    root = ""
    """The folder of a `file://` store; elsewhere there are no development keys."""
    trust_choice = NO_CHOICE
    now: datetime | None = None
    """Time at which keys must not have ended; None: the time of the first question."""

    @property
    def url(self) -> str:
        raise NotImplementedError

    @cached_property
    def trust(self) -> StoreTrust:
        from cachepipe.adapters.store_trust import StoreTrust  # a start that finds its folder present asks no signature

        return StoreTrust(self.trust_choice, self.root, self.url, self.now)


class Store(Protocol):
    """Whole objects under keys. What one process wrote, every process reads and lists from that moment on.

    Every method raises StoreError for a key that `check_key` refuses, and when the store cannot be used; NoRoomError
    when it is full.
    """

    @property
    def url(self) -> str:
        """The address for messages, without credentials."""
        ...

    @property
    def trust(self) -> StoreTrust:
        """Whose signatures count in what is read here, and who signs what is written."""
        ...

    def get(self, key: str, limit_bytes: int) -> bytes | None:
        """Returns an object's bytes, None when it is absent, and never more than asked for.

        Raises:
            IntegrityError: the object is longer than `limit_bytes`.
        """
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Creates an object, whole and durable, only if nothing is there.

        Of any number of writers at once exactly one gets True; a reader sees nothing or all of it; what is there is never changed.

        Returns:
            True: created by this call. False: something is there, whose bytes may differ: read it back.
        """
        ...

    def put_hint(self, key: str, data: bytes) -> None:
        """Writes an object whether or not one is there; readers see the old or the new bytes, never a mixture."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yields all keys that begin with `prefix`, sorted by their bytes; objects in the making are not among them."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; an absent one is no error."""
        ...


def check_key(key: str) -> str:
    """Returns `key` if it is a path of safe parts, none of which begins with a dot.

    Raises:
        StoreError: it is not.
    """
    if len(key) > 512 or not all(_PART.fullmatch(part) for part in key.split("/")):
        raise StoreError(f"not a key of this store: {key[:80]!r}")
    return key


def open_store(url: str, choice: TrustChoice = NO_CHOICE, now: datetime | None = None) -> Store:
    """Returns the store at `file:///path` or an absolute path.

    Args:
        url: the address.
        choice: the trust under which it is used.
        now: time at which keys must not have ended; None: the time of the first question.

    Raises:
        StoreError: another scheme, or a path that is not absolute.
    """
    scheme, found, path = url.partition("://")
    if not found:
        scheme, path = "file", url
    if scheme != "file":
        raise StoreError(f"stores of the kind `{scheme}://` are not in this release", hint="use file:///path")
    if not path.startswith("/"):
        raise StoreError(f"a store's path must be absolute: {url[:200]!r}", hint="use file:///path")
    from cachepipe.adapters.local_store import LocalStore

    store = LocalStore(path)
    store.trust_choice, store.now = choice, now
    return store
