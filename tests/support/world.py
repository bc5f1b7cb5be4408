"""A store under attack: a publisher with keys, an attacker who writes objects, a service that reads by its policy."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path

from cachepipe.adapters.store import TrustChoice
from cachepipe.adapters.store_trust import StoreTrust
from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.index import Index, IndexRow, first_index, select
from cachepipe.domain.layout import hint_key, index_key, statement_key
from cachepipe.domain.policy import Policy
from cachepipe.domain.statement import Statement, statement_bytes
from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE
from cachepipe.workflows.fetch import Artifact, read_artifact, read_channel, row_of
from cachepipe.workflows.publish import publish
from tests.support import authority
from tests.support.artifacts import CPU_PARTS, NOW, make_artifact, parts_of
from tests.support.memory_store import MemoryStore

MACHINE = Fingerprint(parts_of(CPU_PARTS))


class World:
    """One release `demo`, channel `stable`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = MemoryStore(authority.choice(folder / "publisher"))
        self.numbers = 0

    def publish(
        self, number: int | None = None, now: datetime = NOW, channel: str = "stable", release: str = "demo"
    ) -> IndexRow:
        """Publishes another artifact as the real publisher."""
        self.numbers += 1
        number = self.numbers if number is None else number
        return publish(self.store, release, channel, make_artifact(self.folder, number, release=release), now)

    # --- the attacker ------------------------------------------------------------------------------------------------

    def put_index(
        self, version: int, rows: tuple[IndexRow, ...], *labels: str, now: datetime = NOW, **changes: object
    ) -> bytes:
        """Writes an index version over whatever is there, signed by keys of these labels (default: the real one)."""
        index = dataclasses.replace(first_index("demo", "stable", rows, now, f"{version:032x}"), version=version)
        index = dataclasses.replace(index, **changes)  # type: ignore[arg-type]
        data = authority.sealed_index(index, *labels)
        self.store.objects[index_key("demo", "stable", version)] = data
        return data

    def put_raw_index(self, version: int, data: bytes) -> None:
        self.store.objects[index_key("demo", "stable", version)] = data

    def put_statement(self, statement: Statement, *labels: str) -> IndexRow:
        """Writes a statement signed by keys of these labels over whatever is there, and returns its row."""
        envelope = authority.sealed(statement_bytes(statement), STATEMENT_PAYLOAD_TYPE, *labels)
        self.store.objects[statement_key(statement.artifact)] = envelope
        return row_of(statement, envelope)

    def forget_above(self, version: int) -> None:
        """Removes newer versions and sets the hint back: a freeze, or a rollback."""
        prefix = "v1/index/demo/stable/"
        for key in [key for key in self.store.objects if key.startswith(prefix) and key.endswith(".json")]:
            if int(key.removeprefix(prefix)[:10]) > version:
                del self.store.objects[key]
        self.store.objects[hint_key("demo", "stable")] = b"%d\n" % version

    # --- the service --------------------------------------------------------------------------------------------------

    def reader(
        self, policy: Policy | None = None, choice: TrustChoice | None = None, now: datetime = NOW
    ) -> MemoryStore:
        """Returns the same objects as a service with this policy sees them at this time."""
        if choice is None:
            folder = self.folder / "service"
            folder.mkdir(exist_ok=True)
            choice = TrustChoice(policy_file=authority.write_policy(folder / "trust.json", policy))
        store = MemoryStore(choice, self.store.objects)
        store.trust = StoreTrust(choice, "", store.url, now)
        return store

    def restored(
        self, policy: Policy | None = None, now: datetime = NOW, name: str = "demo", channel: str = "stable"
    ) -> Artifact:
        """Returns the artifact that a service with this policy would unpack, by the loader's own steps."""
        store = self.reader(policy, now=now)
        index = read_channel(store, name, channel, now).index
        row = select(index.rows, MACHINE, name, (*index.revoked, *store.trust.policy.revoked))
        return read_artifact(store, row, name)

    def pinned(self, row: IndexRow, policy: Policy | None = None, now: datetime = NOW) -> Artifact:
        """As `restored`, by a lock file that names one row."""
        return read_artifact(self.reader(policy, now=now), row, "demo", is_pinned=True)

    def index(self, version: int, policy: Policy | None = None) -> Index:
        from cachepipe.workflows.fetch import read_index_version

        return read_index_version(self.reader(policy), "demo", "stable", version, None).index
