"""fsck finds every object that is missing, damaged or out of place, and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.domain.index import PAYLOAD_TYPE, IndexRow, index_bytes
from cachepipe.domain.layout import hint_key, index_key, pack_key, pin_key, statement_key, tomb_key
from cachepipe.errors import MissError, StoreError
from cachepipe.workflows.channels import promote, renew
from cachepipe.workflows.fetch import read_artifact, read_channel
from cachepipe.workflows.fsck import Health, fsck
from cachepipe.workflows.publish import publish
from tests.support.aging import age
from tests.support.artifacts import CUDA_PARTS, NOW, make_artifact


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def rows(store: LocalStore, tmp_path: Path) -> list[IndexRow]:
    """Two artifacts for CPUs and one for a GPU; candidate has the last two, stable the first."""
    found = [publish(store, "demo", "candidate", make_artifact(tmp_path, number), NOW) for number in (1, 2)]
    found.append(publish(store, "demo", "candidate", make_artifact(tmp_path, 3, CUDA_PARTS), NOW))
    promote(store, "demo", "candidate", "stable", found[0].artifact, NOW)
    return found


def path(store: LocalStore, key: str) -> Path:
    return Path(store.root, key)


def lines(health: Health) -> list[str]:
    return [f"{found.where}: {found.what}" for found in health.problems]


def test_a_sound_store_has_no_finding(store: LocalStore, rows: list[IndexRow]) -> None:
    before = {key: store.get(key, 1 << 24) for key in store.list("")}
    for is_deep in (False, True):
        health = fsck(store, NOW, is_deep=is_deep)
        assert health.findings == ()
        assert (health.channels, health.versions, health.artifacts, health.is_deep) == (2, 4, 3, is_deep)
        assert health.objects == len(list(store.list("v1/artifacts/")))
    assert {key: store.get(key, 1 << 24) for key in store.list("")} == before


def test_no_store_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(MissError, match="no store"):
        fsck(LocalStore(tmp_path / "nothing"), NOW)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissError, match="no store"):
        fsck(LocalStore(tmp_path / "empty"), NOW)


def packs(store: LocalStore, row: IndexRow) -> list[str]:
    return list(store.list(f"v1/artifacts/{row.artifact}/packs/"))


def test_every_object_of_an_artifact_that_is_missing_is_named(store: LocalStore, rows: list[IndexRow]) -> None:
    for row in rows:
        for key in packs(store, row):
            data = path(store, key).read_bytes()
            store.delete(key)
            assert lines(fsck(store, NOW)) == [f"{key}: missing, and the statement names it"]
            path(store, key).write_bytes(data)
    assert fsck(store, NOW).findings == ()


def test_every_object_that_is_cut_is_found_and_every_flipped_byte_with_deep(
    store: LocalStore, rows: list[IndexRow]
) -> None:
    for key in packs(store, rows[1]):
        data = path(store, key).read_bytes()
        path(store, key).write_bytes(data[:-1])
        (line,) = lines(fsck(store, NOW))
        assert line == f"{key}: wanted {len(data)} bytes, found {len(data) - 1}"
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        path(store, key).write_bytes(flipped)
        assert fsck(store, NOW).findings == ()
        health = fsck(store, NOW, is_deep=True)
        assert health.problems and {found.where for found in health.problems} == {key}
        path(store, key).write_bytes(data)


def test_a_pack_that_grows_beyond_its_size_is_never_read_whole(store: LocalStore, rows: list[IndexRow]) -> None:
    key = packs(store, rows[0])[0]
    os.truncate(path(store, key), 1 << 33)
    assert [found.where for found in fsck(store, NOW, is_deep=True).problems] == [key]


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-2], lambda data: data.replace(b'"', b"'", 1), lambda data: data + b" "],
    ids=["emptied", "cut", "no JSON", "trailing byte"],
)
def test_a_damaged_statement_or_index_is_named(
    store: LocalStore, rows: list[IndexRow], damage: Callable[[bytes], bytes]
) -> None:
    for key, where in (
        (statement_key(rows[0].artifact), statement_key(rows[0].artifact)),
        (index_key("demo", "candidate", 2), "demo@candidate:2"),
    ):
        data = path(store, key).read_bytes()
        path(store, key).write_bytes(damage(data))
        health = fsck(store, NOW)
        assert where in {found.where for found in health.problems}
        path(store, key).write_bytes(data)


def test_a_current_row_without_its_artifact_is_a_problem_and_an_older_one_a_note(
    store: LocalStore, rows: list[IndexRow]
) -> None:
    for key in list(store.list(f"v1/artifacts/{rows[0].artifact}/")):
        store.delete(key)
    health = fsck(store, NOW)
    assert lines(health) == [f"demo@stable:1: is current and names {rows[0].artifact}, which has no readable statement"]
    (note,) = [found for found in health.findings if not found.is_problem]
    assert note.where == "demo@candidate" and note.what.endswith("not here: 1") and "rollback" in note.what
    age(store, "v1/index/", 90)
    for _ in range(11):
        renew(store, "demo", "candidate", NOW)
    assert [found for found in fsck(store, NOW).findings if not found.is_problem] == []


def test_an_exchanged_statement_is_found_though_it_is_sound(store: LocalStore, rows: list[IndexRow]) -> None:
    mine, others = (path(store, statement_key(row.artifact)) for row in rows[:2])
    mine.write_bytes(others.read_bytes())
    found = {problem.where for problem in fsck(store, NOW).problems}
    assert found == {statement_key(rows[0].artifact), "demo@stable:1"}


def test_a_row_with_another_digest_than_the_artifact_has_is_found(store: LocalStore, rows: list[IndexRow]) -> None:
    index = read_channel(store, "demo", "stable", NOW).index
    forged = index_bytes(index).replace(rows[0].statement.encode(), b"f" * 64)
    path(store, index_key("demo", "stable", 1)).write_bytes(store.trust.seal(forged, PAYLOAD_TYPE))
    (line,) = lines(fsck(store, NOW))
    assert line == f"demo@stable:1: names {rows[0].artifact} with another statement than it has: {'f' * 64}"


def test_gaps_are_named_and_hints_that_lie_are_noted(store: LocalStore, rows: list[IndexRow]) -> None:
    store.delete(index_key("demo", "candidate", 2))
    assert lines(fsck(store, NOW)) == ["demo@candidate: 1 of 3 versions are missing: 2"]
    for hint, what in ((b"99\n", "ahead"), (b"x", "not a number"), (b"9" * 70000, "too long")):
        store.put_hint(hint_key("demo", "stable"), hint)
        (note,) = [found for found in fsck(store, NOW).findings if found.where == hint_key("demo", "stable")]
        assert what in note.what and not note.is_problem
    store.delete(hint_key("demo", "stable"))
    assert any("missing" in found.what and not found.is_problem for found in fsck(store, NOW).findings)


def test_a_huge_gap_is_one_line(store: LocalStore, rows: list[IndexRow]) -> None:
    data = path(store, index_key("demo", "stable", 1)).read_bytes()
    path(store, index_key("demo", "stable", 9_999_999_999)).write_bytes(data)
    assert "demo@stable: 9999999997 of 9999999999 versions are missing: 2, 3, 4, 5, 6, 7, 8, 9, …" in lines(
        fsck(store, NOW)
    )


def test_orphans_leftovers_and_foreign_objects_are_notes(
    store: LocalStore, rows: list[IndexRow], tmp_path: Path
) -> None:
    unfinished = publish(store, "demo", "candidate", make_artifact(tmp_path, 5), NOW)
    store.delete(statement_key(unfinished.artifact))
    store.delete(index_key("demo", "candidate", 4))
    store.put_hint(hint_key("demo", "candidate"), b"3\n")
    orphan = pack_key(rows[0].artifact, "a" * 64)
    store.put_if_absent(orphan, b"x")
    for key in (pin_key(rows[0].artifact, "1"), tomb_key(rows[1].artifact, "2")):
        store.put_if_absent(key, b"x")
    assert {found.where for found in fsck(store, NOW).findings} == {orphan, f"v1/artifacts/{unfinished.artifact}/"}
    age(store, "v1/pins/", 2)
    age(store, "v1/tombs/", 2)
    path(store, "v1/my notes.txt").write_text("mine")
    os.symlink("nowhere", path(store, "v1/dangling"))
    health = fsck(store, NOW)
    assert health.problems == ()
    assert {found.where for found in health.findings} == {
        orphan,
        f"v1/artifacts/{unfinished.artifact}/",
        pin_key(rows[0].artifact, "1"),
        tomb_key(rows[1].artifact, "2"),
        "v1/my notes.txt",
    }


def test_an_expired_channel_is_noted_with_what_to_do(store: LocalStore, rows: list[IndexRow]) -> None:
    health = fsck(store, NOW + timedelta(days=15))
    assert [found.where for found in health.findings] == ["demo@candidate:3", "demo@stable:1"]
    assert all("cachepipe renew" in found.what and not found.is_problem for found in health.findings)


def test_a_store_of_another_format_is_refused(store: LocalStore, rows: list[IndexRow]) -> None:
    path(store, "v1/format.json").write_bytes(b'{"features":["x"],"format":2}\n')
    with pytest.raises(StoreError, match="format 2"):
        fsck(store, NOW)
    store.delete("v1/format.json")
    assert lines(fsck(store, NOW)) == ["v1/format.json: missing: the next publisher writes it"]


def test_what_is_published_while_it_runs_is_no_loss(store: LocalStore, rows: list[IndexRow], tmp_path: Path) -> None:
    class Busy(LocalStore):
        def list_objects(self, prefix: str):  # type: ignore[no-untyped-def]
            found = list(super().list_objects(prefix))
            if prefix == "v1/index/":
                publish(store, "demo", "candidate", make_artifact(tmp_path, 6), NOW)
            return iter(found)

    health = fsck(Busy(store.root), NOW, is_deep=True)
    assert [found for found in health.findings if found.is_problem] == []


def test_what_fsck_calls_sound_can_be_restored(store: LocalStore, rows: list[IndexRow]) -> None:
    assert fsck(store, NOW, is_deep=True).problems == ()
    for row in rows:
        read_artifact(store, row, "demo")
