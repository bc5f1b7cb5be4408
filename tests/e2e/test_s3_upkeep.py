"""`gc`, `fsck`, `copy` and the channels on a real S3 server, by the code that also serves folders."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.store import Store
from cachepipe.cli.main import main
from cachepipe.domain.collect import Floors
from cachepipe.domain.index import IndexRow
from cachepipe.domain.layout import hint_key, pin_key, statement_key
from cachepipe.errors import ConflictError, StoreError
from cachepipe.workflows.channels import promote, renew, revoke_everywhere, rollback
from cachepipe.workflows.collect import gc
from cachepipe.workflows.fetch import newest, read_artifact, read_file_table
from cachepipe.workflows.fsck import fsck
from cachepipe.workflows.mirror import copy
from cachepipe.workflows.publish import publish
from tests.support import authority, s3, seaweed
from tests.support.artifacts import make_artifact
from tests.support.fault_proxy import Fault, FaultProxy

NOW = datetime.now(timezone.utc)
NO_FLOORS = Floors(unfinished_s=0.0, published_s=0.0, versions=1, pin_s=0.0)


@pytest.fixture
def proxy(s3_server: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    with FaultProxy(s3_server.ports[0]) as started:
        yield started


@pytest.fixture
def url(proxy: FaultProxy) -> str:
    return s3.address(proxy.url)


@pytest.fixture
def store(url: str) -> Store:
    return s3.opened(url)


@pytest.fixture
def rows(store: Store, tmp_path: Path) -> list[IndexRow]:
    return [publish(store, "demo", "candidate", make_artifact(tmp_path, number), NOW) for number in (1, 2, 3)]


def current(store: Store, channel: str) -> set[IndexRow]:
    found = newest(store, "demo", channel)
    assert found is not None
    for row in found.index.rows:
        read_file_table(store, read_artifact(store, row, "demo").statement)
    return set(found.index.rows)


def test_the_life_of_a_channel_on_s3(store: Store, rows: list[IndexRow], tmp_path: Path) -> None:
    promote(store, "demo", "candidate", "stable", None, NOW)
    assert not promote(store, "demo", "candidate", "stable", None, NOW).is_new
    rollback(store, "demo", "candidate", 1, NOW)
    assert (current(store, "stable"), current(store, "candidate")) == ({rows[2]}, {rows[0]})
    renew(store, "demo", "stable", NOW)
    assert [index.version for index in revoke_everywhere(store, "demo", rows[2].artifact, NOW)] == [5, 3]
    assert not list(store.list("v1/pins/"))
    assert fsck(store, NOW, is_deep=True).problems == ()


def test_gc_on_s3_goes_by_the_servers_clock_and_removes_whole_artifacts(store: Store, rows: list[IndexRow]) -> None:
    assert gc(store, deletes=True).removed == (), "everything is younger than the floors"
    store.put_if_absent(pin_key(rows[0].artifact, "ab" * 16), b"left by a crash")
    done = gc(store, floors=NO_FLOORS, deletes=True)
    assert [found.artifact for found in done.removed] == [row.artifact for row in rows[:2]]
    assert {key.split("/")[2] for key in store.list("v1/artifacts/")} == {rows[2].artifact}
    assert not list(store.list("v1/pins/")) and not list(store.list("v1/tombs/"))
    assert current(store, "candidate") == {rows[2]}
    assert fsck(store, NOW, is_deep=True).problems == ()


def test_a_collection_that_s3_refuses_half_way_is_finished_by_the_next(
    proxy: FaultProxy, store: Store, rows: list[IndexRow]
) -> None:
    proxy.add(Fault("status", method="POST", path="delete", skip=1, status=403, code="AccessDenied"))
    with pytest.raises(StoreError, match=r"denied|403"):
        gc(store, floors=NO_FLOORS, deletes=True)
    assert not list(store.list("v1/tombs/"))
    assert current(store, "candidate") == {rows[2]}
    gc(store, floors=NO_FLOORS, deletes=True)
    assert {key.split("/")[2] for key in store.list("v1/artifacts/")} == {rows[2].artifact}


def test_a_tombstone_whose_answer_was_lost_is_our_own(proxy: FaultProxy, store: Store, rows: list[IndexRow]) -> None:
    proxy.add(Fault("lost", method="PUT", path="/tombs/"))
    assert len(gc(store, floors=NO_FLOORS, deletes=True).removed) == 2
    assert not list(store.list("v1/tombs/"))


def test_releases_travel_from_s3_to_a_folder_and_on_to_another_s3(
    proxy: FaultProxy, url: str, store: Store, rows: list[IndexRow], tmp_path: Path
) -> None:
    disk, other = LocalStore(tmp_path / "usb", authority.shared()), s3.opened(s3.address(proxy.url))
    copy(store, disk, (), ())
    copy(disk, other, (), ())
    assert current(disk, "candidate") == current(other, "candidate") == {rows[2]}
    keys = list(other.list("v1/"))
    assert [other.get(key, 1 << 24) for key in keys] == [store.get(key, 1 << 24) for key in keys]
    proxy.clear()
    done = copy(disk, other, (), ())
    assert {found.objects for found in done.artifacts} == {0}
    assert proxy.requests("PUT", "/packs/") == []
    renew(other, "demo", "candidate", NOW)
    with pytest.raises(ConflictError):
        copy(disk, other, (), ())


def test_foreign_objects_beside_and_below_the_prefix_are_left_alone(
    proxy: FaultProxy, url: str, store: Store, rows: list[IndexRow]
) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=proxy.url)
    prefix = urlsplit(url).path.removeprefix("/")
    strange = [
        f"{prefix}/v1/a b ü.txt",
        f"{prefix}/v1/artifacts//x",
        f"{prefix}/v1/index/demo/stable/",
        f"{prefix}2/v1/x",
    ]
    for key in strange:
        client.put_object(Bucket=seaweed.S3_BUCKET, Key=key, Body=b"" if key.endswith("/") else b"mine")
    assert fsck(store, NOW, is_deep=True).problems == ()
    done = gc(store, floors=NO_FLOORS, deletes=True)
    assert len(done.removed) == 2 and f"{prefix}2" not in str(done.foreign)
    assert client.get_object(Bucket=seaweed.S3_BUCKET, Key=strange[0])["Body"].read() == b"mine"
    assert client.get_object(Bucket=seaweed.S3_BUCKET, Key=strange[3])["Body"].read() == b"mine"


def test_fsck_by_the_command_line_names_what_is_missing_on_s3(
    url: str, store: Store, rows: list[IndexRow], capsys: pytest.CaptureFixture[str]
) -> None:
    store.delete(statement_key(rows[2].artifact))
    store.put_hint(hint_key("demo", "candidate"), b"9\n")
    assert main(["fsck", url]) == 13
    out = capsys.readouterr().out
    assert f"problem  demo@candidate:3: is current and names {rows[2].artifact}" in out
    assert "ahead of the newest version 3" in out


def test_a_role_that_may_not_write_collects_nothing_and_says_what_it_lacks(
    url: str, store: Store, rows: list[IndexRow], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in s3.environment(seaweed.READER).items():
        monkeypatch.setenv(name, value)
    assert main(["gc", url, "--delete"]) == 15
    assert "s3:ListBucket" in capsys.readouterr().err
