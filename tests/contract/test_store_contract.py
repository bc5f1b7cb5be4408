"""What every store must do (T-CONTRACT); a new store is one more row in `FACTORIES`."""

from __future__ import annotations

import hashlib
import multiprocessing
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cachepipe.adapters.store import Store, check_key, open_store
from cachepipe.errors import IntegrityError, StoreError
from tests.support import s3, seaweed

KINDS = ("local", "s3", "s3 boto3", "s3 tls", "s3 tls boto3")
"""The S3 kinds differ in what reads (obstore, or boto3 as with a profile) and in the transport: over http no client sends a
body in chunks with a trailer, over TLS boto3 may."""

RACING_KINDS = ("local", "s3", "s3 tls boto3")

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a fresh store; the environment opens it, here and in child processes."""
    if kind == "local":
        return f"file://{tmp_path / 'store'}"
    server: seaweed.Seaweed = request.getfixturevalue("s3_server")
    for name, value in s3.environment(AWS_CA_BUNDLE=str(server.ca_bundle)).items():
        monkeypatch.setenv(name, value)
    if "boto3" in kind:
        (tmp_path / "config").write_text("[default]\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return s3.address(server.tls_endpoint if "tls" in kind else server.endpoint)


@pytest.fixture
def store(url: str) -> Store:
    return open_store(url)


def test_an_absent_object_is_none(store: Store) -> None:
    assert store.get("v1/a", 10) is None
    assert list(store.list("v1/")) == []


def test_a_created_object_is_read_and_listed_at_once(store: Store, url: str) -> None:
    assert store.put_if_absent("v1/a/b", b"data") is True
    other = open_store(url)
    assert other.get("v1/a/b", 4) == b"data"
    assert list(other.list("v1/")) == ["v1/a/b"]


def test_an_existing_object_is_never_replaced(store: Store) -> None:
    assert store.put_if_absent("v1/a", b"first") is True
    assert store.put_if_absent("v1/a", b"second") is False
    assert store.put_if_absent("v1/a", b"first") is False
    assert store.get("v1/a", 10) == b"first"


def test_an_empty_object_is_an_object(store: Store) -> None:
    assert store.put_if_absent("v1/a", b"") is True
    assert store.get("v1/a", 0) == b""
    assert store.put_if_absent("v1/a", b"x") is False


def test_an_object_longer_than_asked_for_is_refused(store: Store) -> None:
    store.put_if_absent("v1/a", b"12345")
    assert store.get("v1/a", 5) == b"12345"
    with pytest.raises(IntegrityError) as caught:
        store.get("v1/a", 4)
    assert caught.value.found == 5


def test_a_large_object_comes_back_whole(store: Store) -> None:
    data = bytes(range(256)) * (9 << 12)
    assert store.put_if_absent("v1/big", data) is True
    assert store.get("v1/big", len(data)) == data


def test_the_hint_is_overwritten(store: Store) -> None:
    store.put_hint("v1/hint", b"1")
    store.put_hint("v1/hint", b"22")
    assert store.get("v1/hint", 10) == b"22"
    assert list(store.list("v1/")) == ["v1/hint"]


def test_a_list_is_sorted_and_holds_the_prefix_only(store: Store) -> None:
    for key in ("v1/b/2", "v1/b/10", "v1/a", "v1/bc", "v2/x"):
        store.put_if_absent(key, b"x")
    assert list(store.list("v1/")) == ["v1/a", "v1/b/10", "v1/b/2", "v1/bc"]
    assert list(store.list("v1/b")) == ["v1/b/10", "v1/b/2", "v1/bc"]
    assert list(store.list("v1/b/")) == ["v1/b/10", "v1/b/2"]
    assert list(store.list("v1/nothing/")) == []
    assert list(store.list("")) == ["v1/a", "v1/b/10", "v1/b/2", "v1/bc", "v2/x"]


def test_a_deleted_object_is_gone_and_its_name_is_free(store: Store) -> None:
    store.put_if_absent("v1/a", b"1")
    store.delete("v1/a")
    store.delete("v1/a")
    assert store.get("v1/a", 10) is None
    assert list(store.list("")) == []
    assert store.put_if_absent("v1/a", b"2") is True


def test_head_tells_size_age_and_perhaps_the_digest(store: Store) -> None:
    assert store.head("v1/a") is None
    store.put_if_absent("v1/a/b", b"12345")
    assert store.head("v1/a") is None, "a folder of keys is no object"
    found = store.head("v1/a/b")
    assert found is not None
    assert (found.key, found.size_bytes) == ("v1/a/b", 5)
    assert 0 <= found.age_s < 60
    assert found.sha256 in ("", hashlib.sha256(b"12345").hexdigest())


def test_a_list_of_objects_has_sizes_and_ages(store: Store) -> None:
    for key, size in (("v1/b", 2), ("v1/a", 0), ("v2/a", 9)):
        store.put_if_absent(key, b"x" * size)
    found = list(store.list_objects("v1/"))
    assert [(row.key, row.size_bytes) for row in found] == [("v1/a", 0), ("v1/b", 2)]
    assert all(0 <= row.age_s < 60 for row in found)
    assert list(store.list_objects("v3/")) == []


def test_many_objects_are_deleted_and_no_other(store: Store) -> None:
    for key in ("v1/a", "v1/b", "v1/c"):
        store.put_if_absent(key, b"x")
    assert store.delete_all(key for key in ("v1/a", "v1/never", "v1/c")) == 3
    assert list(store.list("")) == ["v1/b"]
    assert store.delete_all(()) == 0


def test_one_key_that_cannot_be_deleted_does_not_keep_the_others(store: Store) -> None:
    store.put_if_absent("v1/a", b"x")
    with pytest.raises(StoreError, match="1 of 2"):
        store.delete_all(("../a", "v1/a"))
    assert list(store.list("")) == []


UNSAFE_KEYS = ["", "/", "/etc/passwd", "a//b", "a/", "../a", "a/../b", "a/..", ".", "a/./b", ".tmp/x", "a/.b"]
UNSAFE_KEYS += ["a\\b", "a b", "a\0b", "é", "a" * 600, "a\n"]


def test_a_key_that_could_leave_the_store_is_refused(store: Store) -> None:
    for key in UNSAFE_KEYS:
        _refuses(store, key)


def _refuses(store: Store, key: str) -> None:
    for act in (
        lambda: store.get(key, 1),
        lambda: store.put_if_absent(key, b"x"),
        lambda: store.put_hint(key, b"x"),
        lambda: store.delete(key),
        lambda: store.head(key),
        lambda: check_key(key),
    ):
        with pytest.raises(StoreError):
            act()


def test_a_prefix_that_could_leave_the_store_is_refused(store: Store) -> None:
    for prefix in ("../", "/etc/", "a/../../b/", ".tmp/"):
        with pytest.raises(StoreError):
            list(store.list(prefix))
        with pytest.raises(StoreError):
            list(store.list_objects(prefix))


def _race(kind: str, target: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> list[object]:
    """Runs a function several times at once: in processes, or where the store is a server in threads with a client each."""
    if kind == "local":
        start, answers = SPAWN.Barrier(len(arguments)), SPAWN.Queue()
        runs = [SPAWN.Process(target=target, args=(start, answers, *row)) for row in arguments]
    else:
        start, answers = threading.Barrier(len(arguments)), queue.Queue()
        runs = [threading.Thread(target=target, args=(start, answers, *row)) for row in arguments]
    for run in runs:
        run.start()
    found = [answers.get(timeout=120) for _ in runs]
    for run in runs:
        run.join(60)
        assert not run.is_alive()
    return found


def _create(start: object, answers: object, url: str, number: int, rounds: int) -> None:
    store = open_store(url)
    start.wait()  # type: ignore[attr-defined]
    won = [store.put_if_absent(f"v1/race/{round_}", b"%d" % number * 5000) for round_ in range(rounds)]
    answers.put((number, won))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", RACING_KINDS, indirect=True)
def test_of_eight_racing_creators_exactly_one_wins(store: Store, url: str, kind: str) -> None:
    rounds, writers = (20, 8) if kind == "local" else (3, 8)
    results = dict(_race(kind, _create, [(url, number, rounds) for number in range(writers)]))  # type: ignore[arg-type]
    for round_ in range(rounds):
        winners = [number for number, won in results.items() if won[round_]]
        assert len(winners) == 1, f"round {round_}: {winners}"
        assert store.get(f"v1/race/{round_}", 1 << 20) == b"%d" % winners[0] * 5000


def _write_hints(start: object, answers: object, url: str, number: int, rounds: int) -> None:
    store = open_store(url)
    start.wait()  # type: ignore[attr-defined]
    if number == 2:  # the reader
        seen = {store.get("v1/hint", 10_000) for _ in range(3 * rounds)}
        answers.put(seen)  # type: ignore[attr-defined]
        return
    for _ in range(rounds):
        store.put_hint("v1/hint", b"%d" % number * 3000)
    answers.put(set())  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", RACING_KINDS, indirect=True)
def test_a_reader_never_sees_a_mixture_of_hints(store: Store, url: str, kind: str) -> None:
    store.put_hint("v1/hint", b"0" * 3000)
    seen = _race(kind, _write_hints, [(url, number, 60 if kind == "local" else 20) for number in range(3)])
    assert set().union(*seen) <= {b"0" * 3000, b"1" * 3000}  # type: ignore[arg-type]
    assert set().union(*seen)  # type: ignore[arg-type]
