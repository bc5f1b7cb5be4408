"""copy: the same bytes in the other store, whole or not visible, and never over another history."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.domain.index import IndexRow
from cachepipe.domain.layout import hint_key, index_key, pack_key, statement_key
from cachepipe.domain.lock import read_lock
from cachepipe.errors import ConflictError, IntegrityError, MissError, NoRoomError, StoreError, UsageError
from cachepipe.workflows.channels import promote, renew, revoke, rollback, write_lock
from cachepipe.workflows.fetch import read_artifact, read_channel, read_file_table
from cachepipe.workflows.fsck import fsck
from cachepipe.workflows.mirror import copy
from cachepipe.workflows.publish import publish
from tests.support.artifacts import CUDA_PARTS, NOW, make_artifact

LATER = NOW + timedelta(hours=1)


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "target")


@pytest.fixture
def rows(source: LocalStore, tmp_path: Path) -> list[IndexRow]:
    """candidate: an old and a new artifact for CPUs, one for a GPU; stable: the new one."""
    found = [publish(source, "demo", "candidate", make_artifact(tmp_path, number), NOW) for number in (1, 2)]
    found.append(publish(source, "demo", "candidate", make_artifact(tmp_path, 3, CUDA_PARTS), NOW))
    promote(source, "demo", "candidate", "stable", found[1].artifact, NOW)
    return found


def contents(store: LocalStore) -> dict[str, bytes | None]:
    return {key: store.get(key, 1 << 24) for key in store.list("v1/")}


def restorable(store: LocalStore, channel: str) -> set[IndexRow]:
    rows = read_channel(store, "demo", channel, LATER).index.rows
    for row in rows:
        read_file_table(store, read_artifact(store, row, "demo").statement)
    return set(rows)


def test_every_channel_arrives_byte_for_byte(source: LocalStore, target: LocalStore, rows: list[IndexRow]) -> None:
    done = copy(source, target, (), ())
    assert [(found.channel, found.version, found.versions) for found in done.channels] == [
        ("candidate", 3, 3),
        ("stable", 1, 1),
    ]
    assert {found.artifact: found.objects for found in done.artifacts} == {rows[1].artifact: 4, rows[2].artifact: 4}
    here, there = contents(source), contents(target)
    assert {key: here[key] for key in there} == there
    assert {key for key in here if key not in there} == set(source.list(f"v1/artifacts/{rows[0].artifact}/"))
    assert restorable(target, "candidate") == set(rows[1:])
    assert fsck(target, NOW, is_deep=True).problems == ()


def test_copying_again_writes_nothing(source: LocalStore, target: LocalStore, rows: list[IndexRow]) -> None:
    copy(source, target, (), ())
    before = contents(target)

    class NoWrites(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            assert key.startswith("v1/pins/") or self.get(key, 1 << 24) == data, key
            return super().put_if_absent(key, data)

        def put_hint(self, key: str, data: bytes) -> None:
            raise AssertionError(key)

    done = copy(source, NoWrites(target.root), (), ())
    assert {found.objects for found in done.artifacts} == {0} and {found.versions for found in done.channels} == {0}
    assert contents(target) == before


def test_later_versions_follow_with_what_they_need(
    source: LocalStore, target: LocalStore, rows: list[IndexRow], tmp_path: Path
) -> None:
    copy(source, target, ("demo@candidate",), ())
    new = publish(source, "demo", "candidate", make_artifact(tmp_path, 4), NOW)
    renew(source, "demo", "candidate", LATER)
    revoke(source, "demo", "candidate", rows[2].artifact, LATER)
    done = copy(source, target, ("demo@candidate",), ())
    assert [(found.version, found.versions) for found in done.channels] == [(6, 3)]
    assert restorable(target, "candidate") == {new}
    assert read_channel(target, "demo", "candidate", LATER).index.revoked == (rows[2].statement,)
    assert target.get(hint_key("demo", "candidate"), 10) == b"6\n"


@pytest.mark.parametrize("kind", ["artifact", "digest", "version", "lock"])
def test_artifacts_alone_are_copied_by_any_reference_and_by_lock(
    source: LocalStore, target: LocalStore, rows: list[IndexRow], kind: str, tmp_path: Path
) -> None:
    lock = write_lock(source, "demo", "stable", tmp_path / "lock", NOW)
    refs = {"artifact": [rows[1].artifact], "digest": [rows[1].statement[:12]], "version": ["demo@stable:1"]}
    done = copy(source, target, refs.get(kind, ()), [lock] if kind == "lock" else ())
    assert [found.artifact for found in done.artifacts] == [rows[1].artifact] and done.channels == ()
    assert not list(target.list("v1/index/"))
    (row,) = read_lock((tmp_path / "lock").read_bytes()).rows
    read_file_table(target, read_artifact(target, row, "demo").statement)
    promote(target, "demo", "candidate", "stable", rows[1].artifact, NOW)
    assert restorable(target, "stable") == {rows[1]}


def test_a_channel_with_a_history_of_its_own_is_refused_before_anything_of_it_is_written(
    source: LocalStore, target: LocalStore, rows: list[IndexRow], tmp_path: Path
) -> None:
    publish(target, "demo", "candidate", make_artifact(tmp_path, 7), NOW)
    before = contents(target)
    with pytest.raises(ConflictError, match="history of its own") as caught:
        copy(source, target, ("demo@candidate",), ())
    assert "promote" in caught.value.hint
    assert contents(target) == before
    copy(source, target, ("demo@stable",), ())
    assert restorable(target, "stable") == {rows[1]}


def test_a_target_that_went_on_alone_is_refused(source: LocalStore, target: LocalStore, rows: list[IndexRow]) -> None:
    copy(source, target, (), ())
    renew(target, "demo", "stable", LATER)
    with pytest.raises(ConflictError, match="demo@stable"):
        copy(source, target, (), ())
    renew(source, "demo", "stable", LATER)
    with pytest.raises(ConflictError, match="version 2"):
        copy(source, target, (), ())


def test_until_the_gap_is_closed_readers_see_the_old_end_of_the_channel(
    source: LocalStore, target: LocalStore, rows: list[IndexRow], tmp_path: Path
) -> None:
    copy(source, target, ("demo@candidate",), ())
    old = restorable(target, "candidate")
    for number in (4, 5, 6):
        new = publish(source, "demo", "candidate", make_artifact(tmp_path, number), NOW)

    class Watched(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            if key.startswith("v1/index/"):
                assert restorable(target, "candidate") == old
            return super().put_if_absent(key, data)

    copy(source, Watched(target.root), ("demo@candidate",), ())
    assert restorable(target, "candidate") == {rows[2], new}


@pytest.mark.parametrize("stop_after", range(12))  # format, two artifacts of four objects, three versions
def test_a_copy_that_fails_anywhere_goes_on_where_it_was(
    source: LocalStore, target: LocalStore, rows: list[IndexRow], stop_after: int
) -> None:
    class Full(LocalStore):
        writes = 0

        def put_if_absent(self, key: str, data: bytes) -> bool:
            if not key.startswith("v1/pins/"):
                self.writes += 1
                if self.writes > stop_after:
                    raise NoRoomError("the store is full")
            return super().put_if_absent(key, data)

    with pytest.raises(NoRoomError):
        copy(source, Full(target.root), ("demo@candidate",), ())
    assert not list(target.list("v1/pins/"))
    copy(source, target, ("demo@candidate",), ())
    assert restorable(target, "candidate") == set(rows[1:])
    assert fsck(target, NOW, is_deep=True).problems == ()


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_bytes_never_arrive(source: LocalStore, target: LocalStore, rows: list[IndexRow], damage: str) -> None:
    key = next(source.list(f"v1/artifacts/{rows[1].artifact}/packs/"))
    path = Path(source.root, key)
    data = path.read_bytes()
    source.delete(key)
    if damage != "gone":
        path.write_bytes(data[:-1] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(MissError if damage == "gone" else IntegrityError):
        copy(source, target, ("demo@stable",), ())
    assert target.get(key, 1 << 24) is None
    assert target.get(statement_key(rows[1].artifact), 1 << 20) is None
    assert not list(target.list("v1/index/"))


def test_other_bytes_in_the_target_are_found_and_stay(
    source: LocalStore, target: LocalStore, rows: list[IndexRow]
) -> None:
    blob = read_artifact(source, rows[1]).statement.packs[0]
    key = pack_key(rows[1].artifact, blob.digest)
    target.put_if_absent(key, b"half")
    with pytest.raises(IntegrityError, match="other bytes"):
        copy(source, target, ("demo@stable",), ())
    assert target.get(key, 10) == b"half"


def test_nothing_to_copy_is_an_error(source: LocalStore, target: LocalStore, rows: list[IndexRow]) -> None:
    with pytest.raises(MissError, match="no store"):
        copy(target, source, (), ())
    for ref, error in (("demo@nothing", MissError), ("demo@candidate:9", MissError), ("??", UsageError)):
        with pytest.raises(error):
            copy(source, target, (ref,), ())
    assert not list(target.list("v1/artifacts/"))


def test_a_source_that_cannot_be_written_is_enough(
    source: LocalStore, target: LocalStore, rows: list[IndexRow]
) -> None:
    class ReadOnly(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            raise StoreError("read-only file system")

        def put_hint(self, key: str, data: bytes) -> None:
            raise StoreError("read-only file system")

        def delete(self, key: str) -> None:
            raise StoreError("read-only file system")

    copy(ReadOnly(source.root), target, (), ())
    assert restorable(target, "stable") == {rows[1]}


def test_a_copied_channel_goes_back_only_to_what_was_copied(
    source: LocalStore, target: LocalStore, rows: list[IndexRow]
) -> None:
    copy(source, target, (), ())
    with pytest.raises(MissError, match="gone"):
        rollback(target, "demo", "candidate", 1, LATER)
    assert target.get(index_key("demo", "candidate", 4), 10) is None
