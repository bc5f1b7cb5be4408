"""Publishing: nothing is replaced, nothing of others is lost, and a store must prove that it honours conditions."""

from __future__ import annotations

import io
import multiprocessing
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.progress import Lines
from cachepipe.adapters.store import TrustChoice, open_store
from cachepipe.domain.index import Index, IndexRow, advance, first_index
from cachepipe.domain.layout import FORMAT_BYTES, FORMAT_KEY, hint_key, index_key, pack_key, statement_key
from cachepipe.domain.limits import LIMITS
from cachepipe.errors import ConflictError, IntegrityError, StoreError, TrustError, UsageError
from cachepipe.workflows.build import BuildRequest, build
from cachepipe.workflows.channels import revoke
from cachepipe.workflows.fetch import read_artifact, read_channel, read_file_table
from cachepipe.workflows.keygen import KeyRequest, keygen
from cachepipe.workflows.publish import PackedArtifact, commit_index, commit_rows, publish, rehearse
from tests.support.artifacts import CPU_PARTS, CUDA_PARTS, NOW, make_artifact, with_artifact_id
from tests.support.manifests import small_manifest, write_manifest, write_sources

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def packed(tmp_path: Path) -> PackedArtifact:
    return make_artifact(tmp_path)


def rows(store: LocalStore, channel: str = "candidate") -> tuple[IndexRow, ...]:
    return read_channel(store, "demo", channel, NOW).index.rows


def test_what_was_published_is_what_is_read(store: LocalStore, packed: PackedArtifact) -> None:
    row = publish(store, "demo", "candidate", packed, NOW)
    assert rows(store) == (row,)
    statement = read_artifact(store, row, "demo").statement
    read_file_table(store, statement)
    for blob in (*statement.packs, statement.table, statement.explain):
        assert store.get(pack_key(row.artifact, blob.digest), blob.size_bytes) is not None


def test_the_store_then_holds_the_layout_and_no_pin(store: LocalStore, packed: PackedArtifact) -> None:
    row = publish(store, "demo", "candidate", packed, NOW)
    keys = set(store.list(""))
    assert store.get(FORMAT_KEY, 100) == FORMAT_BYTES
    assert store.get(hint_key("demo", "candidate"), 100) == b"1\n"
    assert {FORMAT_KEY, statement_key(row.artifact), index_key("demo", "candidate", 1)} <= keys
    assert not [key for key in keys if key.startswith("v1/pins/")]


def test_publishing_again_gives_the_same_row_and_loses_nothing(store: LocalStore, packed: PackedArtifact) -> None:
    first = publish(store, "demo", "candidate", packed, NOW)
    assert publish(store, "demo", "candidate", packed, NOW) == first
    assert rows(store) == (first,)


def test_a_newer_artifact_replaces_that_of_its_target_only(store: LocalStore, tmp_path: Path) -> None:
    old = publish(store, "demo", "candidate", make_artifact(tmp_path, 1), NOW)
    gpu = publish(store, "demo", "candidate", make_artifact(tmp_path, 2, CUDA_PARTS), NOW)
    new = publish(store, "demo", "candidate", make_artifact(tmp_path, 3), NOW)
    assert set(rows(store)) == {gpu, new}
    read_artifact(store, old)  # still there for rollback


def test_machines_of_another_driver_or_isa_keep_their_row(store: LocalStore, tmp_path: Path) -> None:
    facts = [
        CUDA_PARTS,
        {**CUDA_PARTS, "driver": "600.1"},
        {**CPU_PARTS, "cpu_isa": "avx2", "cpu_flags": "avx2 fma"},
        CPU_PARTS,
    ]
    published = [publish(store, "demo", "candidate", make_artifact(tmp_path, n, f), NOW) for n, f in enumerate(facts)]
    assert list(rows(store)) == published


def test_a_name_that_is_not_the_statements_is_refused(store: LocalStore, packed: PackedArtifact) -> None:
    for name, channel in (("other", "candidate"), ("demo", "../x"), ("..", "candidate")):
        with pytest.raises(UsageError):
            publish(store, name, channel, packed, NOW)
    with pytest.raises(UsageError):
        publish(store, "demo", "candidate", with_artifact_id(packed, "../../x"), NOW)
    assert list(store.list("")) == []


@pytest.mark.parametrize("damage", [b"", b"other bytes", None])
def test_a_damaged_blob_is_not_published(store: LocalStore, packed: PackedArtifact, damage: bytes | None) -> None:
    path = packed.blobs / packed.statement.packs[0].digest
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(IntegrityError):
        publish(store, "demo", "candidate", packed, NOW)
    assert not [key for key in store.list("") if not key.startswith("v1/format")]


def test_an_artifact_id_with_other_bytes_is_never_replaced(store: LocalStore, tmp_path: Path) -> None:
    one, two = make_artifact(tmp_path, 1), make_artifact(tmp_path, 2)
    row = publish(store, "demo", "candidate", one, NOW)
    with pytest.raises(IntegrityError, match="already there"):
        publish(store, "demo", "candidate", with_artifact_id(two, one.statement.artifact), NOW)
    assert rows(store) == (row,)
    read_artifact(store, row)


def test_an_artifact_that_cannot_be_restored_does_not_become_current(store: LocalStore, packed: PackedArtifact) -> None:
    publish(store, "demo", "candidate", packed, NOW)
    wrong = PackedArtifact(make_artifact(packed.blobs.parent, 9).statement, packed.blobs.parent / "blobs-9")
    table = wrong.statement.table
    (wrong.blobs / table.digest).write_bytes(b"x" * table.size_bytes)
    with pytest.raises(IntegrityError):
        publish(store, "demo", "candidate", wrong, NOW)
    assert read_channel(store, "demo", "candidate", NOW).version == 1


def test_a_revoked_artifact_is_refused(store: LocalStore, packed: PackedArtifact) -> None:
    row = publish(store, "demo", "candidate", packed, NOW)
    revoke(store, "demo", "candidate", row.artifact, NOW)
    with pytest.raises(TrustError, match="revoked"):
        publish(store, "demo", "candidate", packed, NOW)


# --- conditions ----------------------------------------------------------------------------------------------------------


class Careless(LocalStore):
    """A store that ignores the condition and says so."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put_hint(key, data)
        return True


class Lying(LocalStore):
    """A store that ignores the condition and claims that it did not."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        was_there = self.get(key, 1 << 30) is not None
        self.put_hint(key, data)
        return not was_there


@pytest.mark.parametrize("kind", [Careless, Lying])
def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path, kind: type[LocalStore]) -> None:
    store = kind(tmp_path / "store")
    packed = make_artifact(tmp_path)
    with pytest.raises(StoreError, match="ignores conditions"):
        publish(store, "demo", "candidate", packed, NOW)
    assert not [key for key in store.list("") if not key.startswith("v1/format")]
    row = publish(store, "demo", "candidate", packed, NOW, single_writer=True)
    assert rows(store) == (row,)


@pytest.mark.parametrize("kind", [Careless, Lying])
def test_a_rehearsal_refuses_a_store_that_ignores_conditions(tmp_path: Path, kind: type[LocalStore]) -> None:
    with pytest.raises(StoreError, match="ignores conditions"):
        rehearse(kind(tmp_path / "store"), "demo", "candidate", NOW)


# --- what publishing needs is known before the work -----------------------------------------------------------------------


def test_a_rehearsal_leaves_the_format_alone_and_takes_nothing_from_the_publication(
    store: LocalStore, packed: PackedArtifact
) -> None:
    rehearse(store, "demo", "candidate", NOW)
    assert list(store.list("")) == [FORMAT_KEY]
    publish(store, "demo", "candidate", packed, NOW)
    before = list(store.list(""))
    rehearse(store, "demo", "candidate", NOW)
    assert list(store.list("")) == before


def keys(folder: Path) -> TrustChoice:
    policy = folder / "trust.json"
    for role in ("statement", "index"):
        keygen(KeyRequest(str(folder / role), (role,), policy))
    return TrustChoice(str(policy), False, f"file:{folder / 'statement'}", f"file:{folder / 'index'}")


def test_a_rehearsal_finds_every_key_that_would_not_sign_in_the_end(tmp_path: Path) -> None:
    choice, address = keys(tmp_path), str(tmp_path / "store")
    rehearse(open_store(address, choice, NOW), "demo", "candidate", NOW)
    rehearse(open_store(address, replace(choice, index_key=""), NOW), "demo", "candidate", NOW)  # a builder without it
    wrong = {
        "absent": replace(choice, statement_key=f"file:{tmp_path / 'absent'}"),
        "of the other role": replace(choice, statement_key=choice.index_key),
        "index key of the other role": replace(choice, index_key=choice.statement_key),
        "no address": replace(choice, index_key="key"),
        "statement key not named": replace(choice, statement_key=""),
        "no policy": replace(choice, policy_file=str(tmp_path / "no.json")),
    }
    for what, one in wrong.items():
        with pytest.raises((TrustError, UsageError)):
            rehearse(open_store(address, one, NOW), "demo", "candidate", NOW)
            pytest.fail(what)


def test_a_rehearsal_refuses_a_channel_whose_newest_version_the_policy_does_not_believe(
    store: LocalStore, packed: PackedArtifact, tmp_path: Path
) -> None:
    publish(store, "demo", "candidate", packed, NOW)  # by the development key
    signed = open_store(store.url, keys(tmp_path), NOW)
    with pytest.raises(TrustError, match="development key") as caught:
        rehearse(signed, "demo", "candidate", NOW)
    assert "another store or channel" in caught.value.hint
    rehearse(signed, "demo", "signed", NOW)


def test_a_build_that_could_not_publish_ends_before_it_compiles(tmp_path: Path) -> None:
    write_sources(tmp_path, models="def net():\n    raise RuntimeError('a worker was started')\n")
    manifest = write_manifest(tmp_path, {**small_manifest(), "cache_root": str(tmp_path / "cache")})
    for trust in (TrustChoice(policy_file=str(tmp_path / "no.json")), TrustChoice(statement_key="file:absent")):
        request = BuildRequest(manifest, str(tmp_path / "store"), trust=trust)
        with pytest.raises(TrustError):
            build(request, Lines(io.StringIO(), time.monotonic), NOW)
    assert not (tmp_path / "cache").exists()


class LostAnswer(LocalStore):
    """Index writes land, but their answer is lost."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        done = super().put_if_absent(key, data)
        if key.startswith("v1/index/"):
            raise StoreError("connection reset")
        return done


class RetriedWrite(LocalStore):
    """The client repeats a write whose answer was lost, and is told that something is there."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        super().put_if_absent(key, data)
        return False


@pytest.mark.parametrize("kind", [LostAnswer, RetriedWrite])
def test_an_own_write_is_known_by_its_nonce(tmp_path: Path, kind: type[LocalStore]) -> None:
    store = kind(tmp_path / "store")
    row = publish(store, "demo", "candidate", make_artifact(tmp_path), NOW)
    assert rows(store) == (row,)
    assert read_channel(store, "demo", "candidate", NOW).version == 1


class Broken(LocalStore):
    """Index writes fail."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if key.startswith("v1/index/"):
            raise StoreError("connection refused")
        return super().put_if_absent(key, data)


def test_a_write_that_did_not_land_is_the_stores_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="refused"):
        publish(Broken(tmp_path / "store"), "demo", "candidate", make_artifact(tmp_path), NOW)


class Rival(LocalStore):
    """Another publisher is always a little faster."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if key.startswith("v1/index/"):
            super().put_if_absent(key, b"theirs")
        return super().put_if_absent(key, data)


def test_a_publisher_that_never_wins_gives_up_at_its_deadline(tmp_path: Path) -> None:
    store = Rival(tmp_path / "store")

    def edit(index: Index | None, nonce: str) -> Index:
        return advance(index, (), NOW, nonce) if index else first_index("demo", "candidate", (), NOW, nonce)

    with pytest.raises((ConflictError, IntegrityError)) as caught:
        commit_index(store, "demo", "candidate", edit, deadline_s=-1.0)
    assert caught.type is ConflictError


def test_a_faster_publishers_rows_are_seen_by_the_next_try(store: LocalStore, tmp_path: Path) -> None:
    mine, theirs = make_artifact(tmp_path, 1), make_artifact(tmp_path, 2, CUDA_PARTS)
    calls: list[int] = []

    def change(index: Index | None) -> tuple[IndexRow, ...]:
        calls.append(index.version if index else 0)
        if len(calls) == 1:
            publish(store, "demo", "candidate", theirs, NOW)
        return (*(index.rows if index else ()), row)

    row = publish(store, "demo", "staging", mine, NOW)
    index = commit_rows(store, "demo", "candidate", change, NOW)
    assert calls == [0, 1]
    assert (index.version, len(index.rows)) == (2, 2)


def test_an_index_beyond_the_limit_is_never_written(store: LocalStore, packed: PackedArtifact) -> None:
    row = publish(store, "demo", "candidate", packed, NOW)
    many = (row,) * (LIMITS.index_bytes // 500)
    with pytest.raises(IntegrityError, match="too long"):
        commit_rows(store, "demo", "candidate", lambda _: many, NOW)
    assert rows(store) == (row,)


# --- several publishers ------------------------------------------------------------------------------------------------------


def _publish_rounds(root: str, folder: str, number: int, rounds: int, start: object) -> None:
    facts = {**CPU_PARTS, "threads": str(number + 1)}
    artifacts = [make_artifact(Path(folder), round_, facts) for round_ in range(rounds)]
    start.wait()  # type: ignore[attr-defined]
    for packed in artifacts:
        publish(LocalStore(root), "demo", "candidate", packed, NOW + timedelta(seconds=1))


def test_publishers_of_different_targets_never_lose_each_others_row(store: LocalStore, tmp_path: Path) -> None:
    publishers, rounds = 4, 5
    start = SPAWN.Barrier(publishers)
    processes = []
    for number in range(publishers):
        folder = tmp_path / f"builder-{number}"
        folder.mkdir()
        arguments = (str(store.root), str(folder), number, rounds, start)
        processes.append(SPAWN.Process(target=_publish_rounds, args=arguments))
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    found = read_channel(store, "demo", "candidate", NOW)
    assert found.version == publishers * rounds
    threads = sorted(part.value for row in found.index.rows for part in row.fingerprint if part.name == "threads")
    assert threads == ["1", "2", "3", "4"]
    last = {artifact_row.created_at for artifact_row in found.index.rows}
    assert len(last) == 1  # of every target the last round is current
    assert not list(store.list("v1/pins/"))
