"""What cachepipe asks of a store: the promises of S3, in words. One suite (tests/contract) holds every store to them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cachepipe.errors import StoreError

if TYPE_CHECKING:
    from cachepipe.adapters.store_trust import StoreTrust

COUNTS: Counter[str] = Counter()
"""How often this process met what, by `StoreError.kind`, and `absent_by_403`: probes that a missing right answered."""

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


class StoredObject(NamedTuple):
    """What a store tells of an object without giving its bytes."""

    key: str
    size_bytes: int
    age_s: float
    """Seconds since it was written, never negative, by the store's own clock where it has one: S3's `Date` and
    `Last-Modified`, whole seconds. Machines' clocks differ by more than gc can afford."""
    sha256: str
    """Of its bytes, as the store computed it when they arrived; empty where it does not say, as in every list."""


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

    def head(self, key: str) -> StoredObject | None:
        """Returns size, age and digest of an object without fetching it; None when it is absent."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yields all keys that begin with `prefix`, sorted by their bytes; objects in the making are not among them."""
        ...

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        """As `list`, with size and age; S3 answers a thousand a request either way."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; an absent one is no error. When it returns, no reader sees the object again."""
        ...

    def delete_all(self, keys: Iterable[str]) -> int:
        """Removes objects in no order, a thousand a request where the store can, and returns how many were named.

        Raises:
            StoreError: some could not be removed; their number and the first are named, all others are gone.
        """
        ...

    def sweep(self, age_s: float) -> int:
        """Removes what writers that were killed have left and no list shows, from `age_s` seconds on; returns how many."""
        ...


def is_absent_by_403(error: StoreError) -> bool:
    """Tells whether a refused probe means that there is nothing: S3 says 403, not 404, to a role that may not list.

    Only for a probe after an object beside it was read with the same keys; it is counted apart.
    """
    if error.kind != "forbidden":
        return False
    COUNTS["forbidden"] -= 1
    COUNTS["absent_by_403"] += 1
    return True


def view(store: Store, key: str, limit_bytes: int) -> bytes | memoryview | None:
    """As `store.get`, for bytes that are looked at once: without a copy where the store's client holds them already."""
    own = getattr(store, "view", None)  # no part of the protocol: it saves memory, and promises nothing
    found: bytes | memoryview | None = store.get(key, limit_bytes) if own is None else own(key, limit_bytes)
    return found


def check_key(key: str) -> str:
    """Returns `key` if it is a path of safe parts, none of which begins with a dot.

    Raises:
        StoreError: it is not.
    """
    if len(key) > 512 or not all(_PART.fullmatch(part) for part in key.split("/")):
        raise StoreError(f"not a key of this store: {key[:80]!r}")
    return key


def open_store(url: str, choice: TrustChoice = NO_CHOICE, now: datetime | None = None) -> Store:
    """Returns the store at `file:///path`, an absolute path, or `s3://bucket/prefix`; nothing is asked of it yet.

    Args:
        url: the address.
        choice: the trust under which it is used.
        now: time at which keys must not have ended; None: the time of the first question.

    Raises:
        StoreError: another scheme, or an address that cannot be one.
    """
    scheme, found, path = url.partition("://")
    if not found:
        scheme, path = "file", url
    if scheme == "s3":
        from cachepipe.adapters.s3_read import open_s3

        s3 = open_s3(url)
        s3.trust_choice, s3.now = choice, now
        return s3
    if scheme != "file":
        raise StoreError(
            f"there are no stores of the kind `{scheme[:40]}://`", hint="use s3://bucket/prefix or file:///path"
        )
    if not path.startswith("/"):
        raise StoreError(f"a store's path must be absolute: {url[:200]!r}", hint="use file:///path")
    from cachepipe.adapters.local_store import LocalStore

    store = LocalStore(path, choice)
    store.now = now
    return store
