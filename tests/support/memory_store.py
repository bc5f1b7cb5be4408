"""A store in memory with the promises of `Store`: for attacks by the thousand."""

from __future__ import annotations

from collections.abc import Iterator

from cachepipe.adapters.store import NO_CHOICE, TrustChoice, check_key
from cachepipe.adapters.store_trust import StoreTrust
from cachepipe.errors import IntegrityError


class MemoryStore:
    """Objects in a dictionary; an attacker writes to `objects` directly."""

    url = "memory://"

    def __init__(self, choice: TrustChoice = NO_CHOICE, objects: dict[str, bytes] | None = None) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.trust = StoreTrust(choice, "", self.url)

    def get(self, key: str, limit_bytes: int) -> bytes | None:
        data = self.objects.get(check_key(key))
        if data is not None and len(data) > limit_bytes:
            raise IntegrityError(f"object {key}", "too long", wanted=f"<= {limit_bytes} bytes", found=len(data))
        return data

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self.objects.setdefault(check_key(key), data) is data

    def put_hint(self, key: str, data: bytes) -> None:
        self.objects[check_key(key)] = data

    def list(self, prefix: str) -> Iterator[str]:
        return iter(sorted(key for key in self.objects if key.startswith(prefix)))

    def head(self, key: str) -> object:
        return next((found for found in self.list_objects(key) if found.key == key), None)

    def list_objects(self, prefix: str) -> Iterator[object]:
        from cachepipe.adapters import store

        return (store.StoredObject(key, len(self.objects[key]), 0.0, "") for key in self.list(prefix))

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)
