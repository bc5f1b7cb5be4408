"""Promote, rollback, revoke, renew and lock: each a new version, none with an artifact that is gone or revoked."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.domain.index import IndexRow, select
from cachepipe.domain.layout import statement_key
from cachepipe.domain.lock import read_lock
from cachepipe.errors import MissError, StoreError, TrustError, UnsafePathError, UsageError
from cachepipe.workflows.channels import (
    channels_of,
    promote,
    renew,
    revoke,
    revoke_everywhere,
    rollback,
    write_lock,
)
from cachepipe.workflows.fetch import read_artifact, read_channel, read_index_version
from cachepipe.workflows.publish import publish
from tests.support.artifacts import CPU_PARTS, CUDA_PARTS, NOW, fingerprint_of, make_artifact

LATER = NOW + timedelta(hours=1)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def cpu(store: LocalStore, tmp_path: Path) -> IndexRow:
    return publish(store, "demo", "candidate", make_artifact(tmp_path, 1), NOW)


@pytest.fixture
def gpu(store: LocalStore, tmp_path: Path) -> IndexRow:
    return publish(store, "demo", "candidate", make_artifact(tmp_path, 2, CUDA_PARTS), NOW)


def rows(store: LocalStore, channel: str) -> set[IndexRow]:
    return set(read_channel(store, "demo", channel, LATER).index.rows)


def no_pins(store: LocalStore) -> bool:
    return not list(store.list("v1/pins/"))


# --- promote ----------------------------------------------------------------------------------------------------------


def test_promote_copies_all_targets(store: LocalStore, cpu: IndexRow, gpu: IndexRow) -> None:
    promoted = promote(store, "demo", "candidate", "stable", None, LATER)
    index = promoted.index
    assert promoted.is_new
    assert (index.version, set(index.rows)) == (1, {cpu, gpu})
    assert rows(store, "stable") == {cpu, gpu}
    assert no_pins(store)


def test_promote_with_a_reference_copies_that_artifact_alone(store: LocalStore, cpu: IndexRow, gpu: IndexRow) -> None:
    promote(store, "demo", "candidate", "stable", gpu.artifact, LATER)
    assert rows(store, "stable") == {gpu}


def test_promote_keeps_the_targets_other_rows_and_replaces_the_same_target(
    store: LocalStore, cpu: IndexRow, gpu: IndexRow, tmp_path: Path
) -> None:
    promote(store, "demo", "candidate", "stable", None, LATER)
    newer = publish(store, "demo", "candidate", make_artifact(tmp_path, 3), NOW)
    promote(store, "demo", "candidate", "stable", newer.statement[:12], LATER)
    assert rows(store, "stable") == {gpu, newer}


def test_promoting_twice_changes_no_row(store: LocalStore, cpu: IndexRow) -> None:
    promote(store, "demo", "candidate", "stable", None, LATER)
    promote(store, "demo", "candidate", "stable", None, LATER)
    assert rows(store, "stable") == {cpu}


def test_promote_refuses_a_missing_artifact(store: LocalStore, cpu: IndexRow) -> None:
    store.delete(statement_key(cpu.artifact))
    with pytest.raises(MissError, match="gone"):
        promote(store, "demo", "candidate", "stable", None, LATER)
    with pytest.raises(MissError):
        read_channel(store, "demo", "stable", LATER)
    assert no_pins(store)


def test_promote_refuses_what_is_revoked_in_either_channel(store: LocalStore, cpu: IndexRow, gpu: IndexRow) -> None:
    promote(store, "demo", "candidate", "stable", None, LATER)
    revoke(store, "demo", "stable", cpu.artifact, LATER)
    with pytest.raises(TrustError, match="stable"):
        promote(store, "demo", "candidate", "stable", None, LATER)
    revoke(store, "demo", "candidate", gpu.statement, LATER)
    with pytest.raises(TrustError, match="candidate"):
        promote(store, "demo", "candidate", "canary", gpu.artifact, LATER)


def test_promote_from_nothing_or_to_itself_is_refused(store: LocalStore, cpu: IndexRow) -> None:
    with pytest.raises(MissError):
        promote(store, "demo", "staging", "stable", None, LATER)
    with pytest.raises(UsageError):
        promote(store, "demo", "candidate", "candidate", None, LATER)
    with pytest.raises(UsageError):
        promote(store, "demo", "candidate", "no/name", None, LATER)


def test_promote_needs_a_store_that_honours_conditions(store: LocalStore, cpu: IndexRow) -> None:
    class Careless(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            self.put_hint(key, data)
            return True

    with pytest.raises(StoreError, match="conditions"):
        promote(Careless(store.root), "demo", "candidate", "stable", None, LATER)


# --- rollback ------------------------------------------------------------------------------------------------------------


def test_rollback_publishes_the_rows_of_the_version_before_as_a_new_one(
    store: LocalStore, cpu: IndexRow, tmp_path: Path
) -> None:
    publish(store, "demo", "candidate", make_artifact(tmp_path, 3), NOW)
    index = rollback(store, "demo", "candidate", None, LATER)
    assert (index.version, index.rows) == (3, (cpu,))
    assert rows(store, "candidate") == {cpu}
    assert no_pins(store)


def test_rollback_looks_past_renewals(store: LocalStore, cpu: IndexRow, tmp_path: Path) -> None:
    publish(store, "demo", "candidate", make_artifact(tmp_path, 3), NOW)
    for _ in range(3):
        renew(store, "demo", "candidate", LATER)
    assert rollback(store, "demo", "candidate", None, LATER).rows == (cpu,)


def test_rollback_to_a_named_version(store: LocalStore, cpu: IndexRow, tmp_path: Path) -> None:
    for number in (3, 4):
        publish(store, "demo", "candidate", make_artifact(tmp_path, number), NOW)
    assert rollback(store, "demo", "candidate", 1, LATER).rows == (cpu,)
    with pytest.raises(UsageError, match="current already"):
        rollback(store, "demo", "candidate", 1, LATER)
    with pytest.raises(MissError):
        rollback(store, "demo", "candidate", 99, LATER)


def test_rollback_refuses_revoked_and_missing_artifacts(store: LocalStore, cpu: IndexRow, tmp_path: Path) -> None:
    new = publish(store, "demo", "candidate", make_artifact(tmp_path, 3), NOW)
    store.delete(statement_key(cpu.artifact))
    with pytest.raises(MissError, match="gone"):
        rollback(store, "demo", "candidate", None, LATER)
    revoke(store, "demo", "candidate", cpu.statement, LATER)
    with pytest.raises(TrustError, match="revoked"):
        rollback(store, "demo", "candidate", 1, LATER)
    assert rows(store, "candidate") == {new}


def test_a_channel_with_one_version_cannot_go_back(store: LocalStore, cpu: IndexRow) -> None:
    with pytest.raises(MissError, match="no earlier version"):
        rollback(store, "demo", "candidate", None, LATER)


# --- revoke, renew ----------------------------------------------------------------------------------------------------------


def test_a_revoked_artifact_is_named_and_no_longer_current(store: LocalStore, cpu: IndexRow, gpu: IndexRow) -> None:
    index = revoke(store, "demo", "candidate", cpu.statement[:10], LATER)
    assert (index.rows, index.revoked) == ((gpu,), (cpu.statement,))
    with pytest.raises(TrustError, match=cpu.artifact):
        select((cpu,), fingerprint_of(CPU_PARTS), "demo", index.revoked)
    assert renew(store, "demo", "candidate", LATER).revoked == (cpu.statement,)


def test_a_channel_of_which_all_was_revoked_says_so(
    store: LocalStore, cpu: IndexRow, gpu: IndexRow, tmp_path: Path
) -> None:
    for row in (cpu, gpu):
        index = revoke(store, "demo", "candidate", row.statement, LATER)
    with pytest.raises(MissError, match=f"all of it was revoked .*{cpu.statement[:12]}") as found:
        select(index.rows, fingerprint_of(CPU_PARTS), "demo", index.revoked)
    assert "roll the channel back" in found.value.hint
    with pytest.raises(MissError, match="all of it was revoked"):
        write_lock(store, "demo", "candidate", tmp_path / "cachepipe.lock", LATER)


def test_an_artifact_that_is_gone_can_still_be_revoked(store: LocalStore, cpu: IndexRow) -> None:
    store.delete(statement_key(cpu.artifact))
    assert revoke(store, "demo", "candidate", cpu.artifact, LATER).revoked == (cpu.statement,)
    assert "f" * 64 in revoke(store, "demo", "candidate", "f" * 64, LATER).revoked


def test_renewal_changes_the_expiry_alone(store: LocalStore, cpu: IndexRow) -> None:
    before = read_channel(store, "demo", "candidate", NOW).index
    after = renew(store, "demo", "candidate", LATER)
    assert (after.version, after.rows) == (before.version + 1, before.rows)
    assert after.expires_at > before.expires_at
    with pytest.raises(MissError):
        renew(store, "demo", "nothing", LATER)


def test_no_version_is_ever_changed(store: LocalStore, cpu: IndexRow, gpu: IndexRow) -> None:
    before = [read_index_version(store, "demo", "candidate", version, None) for version in (1, 2)]
    renew(store, "demo", "candidate", LATER)
    revoke(store, "demo", "candidate", cpu.artifact, LATER)
    assert [read_index_version(store, "demo", "candidate", version, None) for version in (1, 2)] == before


# --- lock -----------------------------------------------------------------------------------------------------------------


def test_a_lock_pins_the_current_rows_and_survives_what_comes_after(
    store: LocalStore, cpu: IndexRow, gpu: IndexRow, tmp_path: Path
) -> None:
    path = tmp_path / "cachepipe.lock"
    lock = write_lock(store, "demo", "candidate", path, LATER)
    assert read_lock(path.read_bytes()) == lock
    assert set(lock.rows) == {cpu, gpu}
    assert lock.root == read_artifact(store, cpu, "demo").statement.root != ""
    publish(store, "demo", "candidate", make_artifact(tmp_path, 3), NOW)
    row = select(read_lock(path.read_bytes()).rows, fingerprint_of(CPU_PARTS), "demo")
    assert read_artifact(store, row, "demo").digest == cpu.statement
    assert json.loads(path.read_bytes())["version"] == 2


def test_a_lock_replaces_the_old_file_whole_and_leaves_no_other(
    store: LocalStore, cpu: IndexRow, tmp_path: Path
) -> None:
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "lock").write_text("old")
    write_lock(store, "demo", "candidate", folder / "lock", LATER)
    read_lock((folder / "lock").read_bytes())
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_lock_of_nothing_missing_or_expired_is_refused(store: LocalStore, cpu: IndexRow, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(TrustError):
        write_lock(store, "demo", "candidate", path, NOW + timedelta(days=30))
    with pytest.raises(UnsafePathError):
        write_lock(store, "demo", "candidate", tmp_path / "nowhere" / "lock", LATER)
    store.delete(statement_key(cpu.artifact))
    with pytest.raises(MissError):
        write_lock(store, "demo", "candidate", path, LATER)
    revoke(store, "demo", "candidate", cpu.artifact, LATER)
    with pytest.raises(MissError):
        write_lock(store, "demo", "candidate", path, LATER)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "folder"])
def test_a_lock_never_takes_the_place_of_a_device_or_a_pipe(
    store: LocalStore, cpu: IndexRow, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "there"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(tmp_path / "pipe")
        path = tmp_path / "pipe" if kind == "pipe" else path
    if kind == "link to a pipe":
        path.symlink_to(tmp_path / "pipe")
    with pytest.raises(UnsafePathError, match="not a regular file"):
        write_lock(store, "demo", "candidate", path, LATER)
    assert path.is_symlink() == (kind == "link to a pipe") and not path.is_file()


def test_a_lock_that_is_a_link_keeps_it_and_replaces_the_file(store: LocalStore, cpu: IndexRow, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    lock = write_lock(store, "demo", "candidate", tmp_path / "link", LATER)
    assert (tmp_path / "link").is_symlink() and read_lock((tmp_path / "real").read_bytes()) == lock


# --- packs that are gone ----------------------------------------------------------------------------------------------


def test_an_artifact_without_all_its_packs_is_neither_promoted_nor_locked(
    store: LocalStore, cpu: IndexRow, tmp_path: Path
) -> None:
    store.delete(next(store.list(f"v1/artifacts/{cpu.artifact}/packs/")))
    with pytest.raises(MissError, match="lost 1 objects"):
        promote(store, "demo", "candidate", "stable", None, LATER)
    with pytest.raises(MissError, match="lost 1 objects"):
        write_lock(store, "demo", "candidate", tmp_path / "lock", LATER)
    assert not list(store.list("v1/index/demo/stable/")) and no_pins(store)


# --- what changes nothing writes nothing; what is of another release is refused ---------------------------------------------


def test_promoting_rows_that_are_there_writes_no_version(store: LocalStore, cpu: IndexRow, gpu: IndexRow) -> None:
    first = promote(store, "demo", "candidate", "stable", None, LATER)
    before = list(store.list("v1/index/"))
    for ref in (None, cpu.artifact, gpu.statement[:12], "demo@candidate:1"):
        assert promote(store, "demo", "candidate", "stable", ref, LATER + timedelta(days=1)) == replace(
            first, is_new=False
        )
    assert list(store.list("v1/index/")) == before and no_pins(store)


def test_a_reference_of_another_release_is_refused_by_name(store: LocalStore, cpu: IndexRow, tmp_path: Path) -> None:
    other = publish(store, "other", "candidate", make_artifact(tmp_path, 9, release="other"), NOW)
    refs = (
        other.artifact,
        other.statement,
        other.statement[:12],
        "other@candidate",
        "other@candidate:1",
        "other@nothing",
    )
    for ref in refs:
        with pytest.raises(UsageError, match="is of the release `other`, not `demo`") as caught:
            promote(store, "demo", "candidate", "stable", ref, LATER)
        assert caught.value.hint == "use --name other"
    for ref in (other.artifact, "other@candidate"):
        with pytest.raises(UsageError, match="of the release `other`"):
            revoke(store, "demo", "candidate", ref, LATER)
    assert rows(store, "candidate") == {cpu}
    assert not list(store.list("v1/index/demo/stable/")) and no_pins(store)


def test_what_is_not_there_is_named_in_the_message(store: LocalStore, cpu: IndexRow) -> None:
    for ref in ("demo@nothing", "demo@candidate:7"):
        with pytest.raises(MissError, match=ref):
            promote(store, "demo", "candidate", "stable", ref, LATER)


def test_revoking_everywhere_reaches_every_channel_once(store: LocalStore, cpu: IndexRow, gpu: IndexRow) -> None:
    promote(store, "demo", "candidate", "stable", None, LATER)
    first = revoke_everywhere(store, "demo", cpu.statement[:9], LATER)
    assert [(index.channel, index.version, index.rows) for index in first] == [
        ("candidate", 3, (gpu,)),
        ("stable", 2, (gpu,)),
    ]
    assert all(index.revoked == (cpu.statement,) for index in first)
    assert revoke_everywhere(store, "demo", cpu.artifact, LATER) == first, "nothing is left to change"
    with pytest.raises(MissError):
        revoke_everywhere(store, "nothing", cpu.artifact, LATER)


def test_a_channel_can_be_revoked_with_all_its_targets(store: LocalStore, cpu: IndexRow, gpu: IndexRow) -> None:
    index = revoke(store, "demo", "candidate", "demo@candidate", LATER)
    assert (index.rows, set(index.revoked)) == ((), {cpu.statement, gpu.statement})


def test_names_of_channels_come_from_index_versions_alone(store: LocalStore, cpu: IndexRow) -> None:
    promote(store, "demo", "candidate", "stable", None, LATER)
    store.put_if_absent("v1/index/demo/notes", b"x")
    store.put_if_absent("v1/index/demo/empty/hint", b"1\n")
    assert channels_of(store, "demo") == ("candidate", "stable")
    with pytest.raises(UsageError):
        channels_of(store, "../x")
