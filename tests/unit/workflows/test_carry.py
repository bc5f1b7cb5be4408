"""What a build may carry over: an unrevoked artifact of this machine, device and path; nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.index import IndexRow
from cachepipe.workflows.carry import Earlier, earlier_artifact
from cachepipe.workflows.channels import revoke
from cachepipe.workflows.plan import Plan, PlannedEntry
from cachepipe.workflows.publish import PackedArtifact, publish
from tests.support.artifacts import (
    CPU_PARTS,
    NOW,
    ROOT,
    entry_record,
    entry_spec,
    fingerprint_of,
    make_artifact,
)

RECORD = entry_record(entry_spec())
PLAN = Plan("demo", ROOT, "cpu", (PlannedEntry(RECORD.spec, RECORD.key, RECORD.key_parts),), ())


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def published(store: LocalStore, packed: PackedArtifact) -> IndexRow:
    return publish(store, "demo", "candidate", packed, NOW)


def found(store: LocalStore, plan: Plan = PLAN, facts: Mapping[str, str] = CPU_PARTS) -> Earlier | None:
    return earlier_artifact(store, plan, "candidate", (fingerprint_of(facts),), NOW)


def test_the_newest_artifact_of_this_machine_is_carried_over_by_entry_key(store: LocalStore, tmp_path: Path) -> None:
    published(store, make_artifact(tmp_path, 1))
    row = published(store, make_artifact(tmp_path, 2))
    earlier = found(store)
    assert earlier is not None and earlier.artifact.digest == row.statement
    assert earlier.numbers == {RECORD.key: 0}
    assert earlier.is_the_same_release(PLAN)


def test_an_entry_with_another_key_is_not_held(store: LocalStore, tmp_path: Path) -> None:
    published(store, make_artifact(tmp_path, 1, entries=(entry_record(RECORD.spec, {"factory": "0" * 64}),)))
    earlier = found(store)
    assert earlier is not None and RECORD.key not in earlier.numbers
    assert not earlier.is_the_same_release(PLAN)


@pytest.mark.parametrize(
    "changes", [{"root": "/elsewhere/demo"}, {"device": "cuda"}, {"name": "other"}], ids=["path", "device", "release"]
)
def test_what_was_built_for_another_place_is_not_carried_over(
    store: LocalStore, tmp_path: Path, changes: dict[str, str]
) -> None:
    published(store, make_artifact(tmp_path, 1))
    assert found(store, dataclasses.replace(PLAN, **changes)) is None  # type: ignore[arg-type]


def test_another_machine_s_artifact_is_not_carried_over(store: LocalStore, tmp_path: Path) -> None:
    published(store, make_artifact(tmp_path, 1))
    assert found(store, facts={**CPU_PARTS, "torch": "2.11.0"}) is None


def test_a_revoked_artifact_is_not_carried_over(store: LocalStore, tmp_path: Path) -> None:
    row = published(store, make_artifact(tmp_path, 1))
    revoke(store, "demo", "candidate", row.statement, NOW)
    assert found(store) is None


def test_an_expired_channel_gives_nothing(store: LocalStore, tmp_path: Path) -> None:
    published(store, make_artifact(tmp_path, 1))
    machine: tuple[Fingerprint, ...] = (fingerprint_of(CPU_PARTS),)
    assert earlier_artifact(store, PLAN, "candidate", machine, NOW + timedelta(days=400)) is None
