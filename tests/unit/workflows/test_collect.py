"""gc removes what nobody can want, says why, and never what is locked, pinned, named or young."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.store import StoredObject
from cachepipe.domain.collect import Floors
from cachepipe.domain.index import IndexRow
from cachepipe.domain.layout import index_key, pin_key, statement_key, tomb_key, tomb_prefix
from cachepipe.domain.lock import lock_of
from cachepipe.errors import ConflictError, IntegrityError, MissError, NoRoomError, StoreError
from cachepipe.workflows import collect
from cachepipe.workflows import publish as publishing
from cachepipe.workflows.channels import promote, renew, revoke
from cachepipe.workflows.collect import Collection, gc
from cachepipe.workflows.fetch import read_artifact, read_channel, read_file_table
from cachepipe.workflows.publish import publish
from tests.support.aging import age
from tests.support.artifacts import NOW, make_artifact

LATER = NOW + timedelta(hours=1)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def release(store: LocalStore, folder: Path, number: int) -> IndexRow:
    return publish(store, "demo", "candidate", make_artifact(folder, number), NOW)


@pytest.fixture(scope="module")
def thirteen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[IndexRow]]:
    folder = tmp_path_factory.mktemp("thirteen")
    store = LocalStore(folder / "store")
    rows = [release(store, folder, number) for number in range(1, 14)]
    age(store, "v1/", 50)
    return folder / "store", rows


@pytest.fixture
def old(store: LocalStore, thirteen: tuple[Path, list[IndexRow]]) -> list[IndexRow]:
    """Thirteen releases in one channel, all of them written 50 days ago."""
    template, rows = thirteen
    shutil.copytree(template, store.root)
    return list(rows)


def removed(done: Collection) -> set[str]:
    return {decision.artifact for decision in done.removed}


def reason(done: Collection, row: IndexRow) -> str:
    return next(decision.reason for decision in done.decisions if decision.artifact == row.artifact)


def files(store: LocalStore) -> dict[str, bytes | None]:
    return {key: store.get(key, 1 << 24) for key in store.list("")}


def test_a_dry_run_says_what_and_why_and_writes_nothing(store: LocalStore, old: list[IndexRow]) -> None:
    before = files(store)
    done = gc(store)
    assert removed(done) == {row.artifact for row in old[:3]}
    assert "published 50 days ago" in reason(done, old[0])
    assert reason(done, old[3]) == "demo@candidate:4 names it, among the last 10 versions"
    assert reason(done, old[12]) == "demo@candidate:13 names it, current"
    assert done.is_dry_run and files(store) == before


def test_what_is_removed_is_gone_whole_and_all_else_is_untouched(store: LocalStore, old: list[IndexRow]) -> None:
    before = files(store)
    said: list[str] = []
    done = gc(store, deletes=True, say=said.append)
    gone = {row.artifact for row in old[:3]}
    assert removed(done) == gone and len(said) == 3
    assert files(store) == {key: data for key, data in before.items() if not gone & set(key.split("/"))}
    for row in old[3:]:
        read_file_table(store, read_artifact(store, row, "demo").statement)
    assert gc(store, deletes=True).removed == ()


def test_what_a_lock_file_names_is_never_removed(store: LocalStore, old: list[IndexRow]) -> None:
    index = read_channel(store, "demo", "candidate", NOW).index
    locks = [lock_of(replace(index, rows=(old[number],))) for number in (0, 2)]
    done = gc(store, locks, deletes=True)
    assert removed(done) == {old[1].artifact}
    assert reason(done, old[0]) == "a lock file names it"


def test_a_lock_file_of_another_store_is_noticed(store: LocalStore, old: list[IndexRow], tmp_path: Path) -> None:
    elsewhere = LocalStore(tmp_path / "elsewhere")
    row = release(elsewhere, tmp_path / "other", 99)
    done = gc(store, [lock_of(read_channel(elsewhere, "demo", "candidate", NOW).index)])
    assert done.unknown_locked == (row.artifact,)


def test_a_pinned_artifact_stays_until_the_pin_is_a_days_old(store: LocalStore, old: list[IndexRow]) -> None:
    pin = pin_key(old[0].artifact, "ab" * 16)
    store.put_if_absent(pin, b"{}\n")
    done = gc(store, deletes=True)
    assert old[0].artifact not in removed(done) and "pinned" in reason(done, old[0])
    assert store.get(pin, 10) is not None
    age(store, pin, 1.01)
    done = gc(store, deletes=True)
    assert removed(done) == {old[0].artifact}
    assert done.announcements == (pin,) and store.get(pin, 10) is None


def test_an_unfinished_artifact_is_removed_after_a_day_and_a_published_one_after_thirty(
    store: LocalStore, old: list[IndexRow], tmp_path: Path
) -> None:
    young = release(store, tmp_path, 20)
    newer = release(store, tmp_path, 21)
    for row in (young, newer):
        store.delete(statement_key(row.artifact))
    for number in range(1, 16):  # nothing counts but age: the versions are not those of a real store any more
        store.delete(index_key("demo", "candidate", number))
    age(store, f"v1/artifacts/{young.artifact}", 1.01)
    age(store, f"v1/artifacts/{old[0].artifact}", 29.9)
    done = gc(store, deletes=True)
    assert removed(done) == {young.artifact, *(row.artifact for row in old[1:])}
    assert reason(done, newer) == "unfinished for 0.0 hours"
    assert reason(done, old[0]) == "published 30 days ago"


def test_thirty_days_count_from_when_it_was_last_current(store: LocalStore, tmp_path: Path) -> None:
    rows = [release(store, tmp_path, number) for number in range(1, 4)]
    for _ in range(12):
        renew(store, "demo", "candidate", NOW)
    age(store, "v1/", 50)
    assert removed(gc(store)) == {rows[0].artifact, rows[1].artifact}
    age(store, index_key("demo", "candidate", 3), 29)
    assert removed(gc(store)) == {rows[0].artifact}


def test_every_channel_protects(store: LocalStore, old: list[IndexRow]) -> None:
    promote(store, "demo", "candidate", "stable", old[0].artifact, NOW)
    age(store, "v1/", 500)
    done = gc(store, deletes=True)
    assert removed(done) == {old[1].artifact, old[2].artifact}
    assert reason(done, old[0]) == "demo@stable:1 names it, current"


def test_a_revoked_artifact_goes_by_the_same_floors(store: LocalStore, old: list[IndexRow], tmp_path: Path) -> None:
    revoke(store, "demo", "candidate", old[12].artifact, NOW)
    assert old[12].artifact not in removed(gc(store))
    for _ in range(11):
        renew(store, "demo", "candidate", NOW)
    age(store, "v1/", 100)
    assert old[12].artifact in removed(gc(store, deletes=True))
    assert old[12].statement in read_channel(store, "demo", "candidate", NOW).index.revoked


def test_foreign_objects_are_told_and_stay(store: LocalStore, old: list[IndexRow]) -> None:
    strange = [f"v1/artifacts/{old[0].artifact}/notes.txt", "v1/junk", "v1/artifacts/with space", "v1/index/x/y/z/deep"]
    for key in strange:
        path = Path(store.root, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    Path(store.root, "outside").write_text("mine")
    age(store, "v1/", 400)
    done = gc(store, deletes=True)
    assert set(done.foreign) == set(strange)
    assert old[0].artifact in removed(done)
    assert all(Path(store.root, key).read_text() == "mine" for key in [*strange, "outside"])


@pytest.mark.parametrize("version", [13, 5])
def test_an_index_that_cannot_be_read_stops_gc_before_it_removes_anything(
    store: LocalStore, old: list[IndexRow], version: int
) -> None:
    Path(store.root, index_key("demo", "candidate", version)).write_bytes(b'{"payload":')
    before = files(store)
    with pytest.raises(IntegrityError):
        gc(store, deletes=True)
    assert files(store) == before


def test_an_old_index_that_cannot_be_read_does_not_matter(store: LocalStore, old: list[IndexRow]) -> None:
    Path(store.root, index_key("demo", "candidate", 1)).write_bytes(b"junk")
    assert len(gc(store, deletes=True).removed) == 3


def test_a_gap_in_the_history_protects_both_of_its_sides(store: LocalStore, old: list[IndexRow]) -> None:
    store.delete(index_key("demo", "candidate", 3))
    assert removed(gc(store)) == {old[0].artifact, old[2].artifact}
    assert reason(gc(store), old[1]) == "demo@candidate:2 names it, current"


def test_no_store_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(MissError, match="no store"):
        gc(LocalStore(tmp_path / "nothing"))


def test_a_store_that_cannot_be_written_is_looked_at_and_refuses_to_delete(
    store: LocalStore, old: list[IndexRow]
) -> None:
    class ReadOnly(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            raise StoreError("read-only file system")

        def delete(self, key: str) -> None:
            raise StoreError("read-only file system")

    before = files(store)
    read_only = ReadOnly(store.root)
    assert len(gc(read_only).removed) == 3
    with pytest.raises(StoreError):
        gc(read_only, deletes=True)
    assert files(store) == before


def test_clocks_that_differ_stop_gc(store: LocalStore, old: list[IndexRow]) -> None:
    class Skewed(LocalStore):
        """Its files are dated by a server that is two days behind this machine."""

        def head(self, key: str) -> StoredObject | None:
            found = super().head(key)
            return found and found._replace(age_s=found.age_s + 2 * 86400)

    with pytest.raises(StoreError, match="clocks"):
        gc(Skewed(store.root), deletes=True)
    assert not list(store.list("v1/tombs/"))
    assert all(store.get(statement_key(row.artifact), 1 << 20) for row in old)


def test_objects_from_the_future_are_young(store: LocalStore, old: list[IndexRow]) -> None:
    age(store, f"v1/artifacts/{old[0].artifact}", -3)
    assert old[0].artifact not in removed(gc(store))


# --- both sides announce before they look -------------------------------------------------------------------------------


class Interleaved(LocalStore):
    """Runs `act` once, after the tombstones were written and before gc looks again."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.act: Callable[[], object] = lambda: None

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        if prefix == "v1/pins/":
            act, self.act = self.act, lambda: None
            act()
        return super().list_objects(prefix)


def test_a_promotion_between_announcement_and_second_look_is_seen(store: LocalStore, old: list[IndexRow]) -> None:
    collector = Interleaved(store.root)

    def claim() -> None:  # what a promoter that saw no tombstone does last
        index = read_channel(store, "demo", "candidate", NOW).index
        publishing.commit_rows(store, "demo", "stable", lambda _: (old[1], *index.rows), NOW)

    collector.act = claim
    done = gc(collector, deletes=True)
    assert removed(done) == {old[0].artifact, old[2].artifact}
    assert reason(done, old[1]) == "demo@stable:1 names it, current"
    read_artifact(store, old[1], "demo")
    assert not list(store.list("v1/tombs/"))


def test_a_pin_between_announcement_and_second_look_is_seen(store: LocalStore, old: list[IndexRow]) -> None:
    collector = Interleaved(store.root)
    collector.act = lambda: store.put_if_absent(pin_key(old[2].artifact, "cd" * 16), b"{}\n")
    assert removed(gc(collector, deletes=True)) == {old[0].artifact, old[1].artifact}
    assert not list(store.list("v1/tombs/"))


def test_two_collectors_do_not_undo_each_other(store: LocalStore, old: list[IndexRow]) -> None:
    collector = Interleaved(store.root)
    collector.act = lambda: gc(store, deletes=True)
    done = gc(collector, deletes=True)
    assert removed(done) == {row.artifact for row in old[:3]}
    assert not list(store.list("v1/tombs/"))


def test_a_promoter_gives_way_to_a_tombstone_and_leaves_no_pin(
    store: LocalStore, old: list[IndexRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "TOMB_WAIT_S", 0.0)
    store.put_if_absent(tomb_key(old[0].artifact, "ef" * 16), b"{}\n")
    with pytest.raises(ConflictError, match="gc is removing"):
        promote(store, "demo", "candidate", "stable", old[0].artifact, NOW)
    assert not list(store.list("v1/pins/")) and not list(store.list("v1/index/demo/stable/"))
    age(store, tomb_prefix(old[0].artifact), 1 / 23)  # more than an hour: left by a crash
    promote(store, "demo", "candidate", "stable", old[0].artifact, NOW)
    assert gc(store, deletes=True).announcements == (tomb_key(old[0].artifact, "ef" * 16),)
    assert not list(store.list("v1/tombs/"))


def test_a_pin_that_is_too_old_claims_nothing(
    store: LocalStore, old: list[IndexRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "FLOORS", Floors(pin_s=0.0))
    with pytest.raises(ConflictError, match="took more than"):
        promote(store, "demo", "candidate", "stable", None, NOW)
    assert not list(store.list("v1/index/demo/stable/"))


def test_a_failing_store_leaves_no_tombstone_of_what_was_not_begun(store: LocalStore, old: list[IndexRow]) -> None:
    class Failing(LocalStore):
        def delete(self, key: str) -> None:
            if key.endswith("statement.dsse.json"):
                raise StoreError("access denied")
            super().delete(key)

    with pytest.raises(StoreError, match="access denied"):
        gc(Failing(store.root), deletes=True)
    assert not list(store.list("v1/tombs/"))
    assert all(store.get(statement_key(row.artifact), 1 << 20) for row in old)


def test_more_than_one_batch_is_removed(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "BATCH", 5)
    row = release(store, tmp_path, 1)
    whole = Path(store.root, "v1/artifacts", row.artifact)
    number = 13
    for copy in range(number):
        shutil.copytree(whole, whole.with_name(f"{row.artifact[:-4]}{copy:04d}"))
    age(store, "v1/artifacts/", 31)
    assert len(gc(store, deletes=True).removed) == number
    assert sorted(os.listdir(Path(store.root, "v1"))) == ["artifacts", "format.json", "index"]
    assert os.listdir(whole.parent) == [row.artifact], "no folder of what was removed stays"
    read_artifact(store, row, "demo")


def test_what_killed_writers_left_is_swept_after_a_day(store: LocalStore, old: list[IndexRow]) -> None:
    litter = [Path(store.root, ".tmp", name) for name in ("1.young", "1.old")]
    for path in litter:
        path.write_bytes(b"half")
    os.utime(litter[1], (1, 1))
    gc(store)
    assert litter[1].exists()
    gc(store, deletes=True)
    assert [path.exists() for path in litter] == [True, False]


def test_a_full_disk_is_named_and_what_crashes_left_makes_room(store: LocalStore, old: list[IndexRow]) -> None:
    class Full(LocalStore):
        """Every file takes a block; one is free as soon as something was removed."""

        is_full = True

        def put_if_absent(self, key: str, data: bytes) -> bool:
            if self.is_full:
                raise NoRoomError(f"the store is full: `{key}`")
            return super().put_if_absent(key, data)

        def sweep(self, age_s: float) -> int:
            count = super().sweep(age_s)
            self.is_full = self.is_full and not count
            return count

    full = Full(store.root)
    with pytest.raises(NoRoomError):
        gc(full, deletes=True)
    assert all(store.get(statement_key(row.artifact), 1 << 20) for row in old)
    litter = Path(store.root, ".tmp", "1.old")
    litter.write_bytes(b"half")
    os.utime(litter, (1, 1))
    assert len(gc(full, deletes=True).removed) == 3


def test_thousands_of_objects_are_judged_in_a_second(store: LocalStore, old: list[IndexRow]) -> None:
    base = Path(store.root, "v1/artifacts")
    names = [f"{old[0].artifact[:-8]}ZZZZ{number:04d}" for number in range(1500)]
    for name in names:
        (base / name / "packs").mkdir(parents=True)
        for digest in ("a" * 64, "b" * 64):
            (base / name / "packs" / digest).touch()
    age(store, f"v1/artifacts/{old[0].artifact[:-8]}ZZZZ", 3)
    began = time.process_time()
    done = gc(store)
    assert len(done.removed) == 1500 + 3
    assert time.process_time() - began < 3
