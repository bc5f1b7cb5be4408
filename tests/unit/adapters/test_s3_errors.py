"""Each refusal of an S3 server has its own message, hint and counter, through both clients (cases K1, K6)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import pytest

from cachepipe.adapters import s3 as s3_boto3
from cachepipe.adapters import s3_read
from cachepipe.adapters.s3 import S3Store
from cachepipe.adapters.s3_read import S3ReadStore
from cachepipe.adapters.s3_settings import read_settings
from cachepipe.adapters.store import COUNTS, Store, open_store
from cachepipe.domain.collect import Floors
from cachepipe.errors import IntegrityError, StoreError
from cachepipe.workflows.collect import gc
from cachepipe.workflows.fsck import fsck
from cachepipe.workflows.publish import publish
from tests.support import s3, seaweed
from tests.support.artifacts import make_artifact
from tests.support.fault_proxy import Fault, FaultProxy


@pytest.fixture(scope="module")
def started(s3_server: seaweed.Seaweed) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.ports[0]) as proxy:
        yield proxy


@pytest.fixture
def proxy(started: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    started.clear()
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return started


def boto3_store(url: str) -> Store:
    return S3Store(read_settings(url, os.environ))


def obstore_store(url: str) -> Store:
    return S3ReadStore(read_settings(url, os.environ), os.environ)


@pytest.fixture(params=[boto3_store, obstore_store], ids=["boto3", "obstore"])
def client(request: pytest.FixtureRequest) -> Callable[[str], Store]:
    return request.param  # type: ignore[no-any-return]


class Row(NamedTuple):
    status: int
    code: str
    kind: str
    message: str
    hint: str


REFUSALS = [
    Row(301, "PermanentRedirect", "redirect", "the S3 bucket `cachepipe` is not in region `us-east-1`", "AWS_REGION"),
    Row(400, "AuthorizationHeaderMalformed", "redirect", "not in region", "AWS_REGION"),
    Row(400, "ExpiredToken", "credentials", "the session token has expired", "fresh keys"),
    Row(403, "InvalidAccessKeyId", "credentials", "does not know this access key", "fresh keys"),
    Row(403, "SignatureDoesNotMatch", "credentials", "the secret key does not belong", "fresh keys"),
    Row(403, "RequestTimeTooSkewed", "credentials", "clock differs", "set the clock"),
    Row(403, "AccessDenied", "forbidden", "no right to read `v1/a`", "s3:GetObject on arn:aws:s3:::cachepipe/"),
    Row(404, "NoSuchBucket", "no_bucket", "there is no S3 bucket `cachepipe`", "create it"),
    Row(412, "PreconditionFailed", "conflict", "again and again", "run the command again"),
    Row(429, "TooManyRequests", "slow_down", "overloaded", "run the command again"),
    Row(500, "InternalError", "slow_down", "overloaded or broken", "run the command again"),
    Row(503, "SlowDown", "slow_down", "overloaded", "run the command again"),
    Row(400, "InvalidRequest", "unusable", "cannot read `v1/a`", "address and rights"),
    Row(405, "MethodNotAllowed", "unusable", "cannot read `v1/a`", "address and rights"),
]


@pytest.mark.parametrize("row", REFUSALS, ids=[f"{row.status} {row.code}" for row in REFUSALS])
def test_case_k1_every_refusal_has_a_message_a_hint_and_a_counter(
    row: Row, client: Callable[[str], Store], proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (s3_read, s3_boto3):
        monkeypatch.setattr(module, "TRIES", 2)
    s3_read._one_reader.cache_clear()
    proxy.add(Fault("status", method="GET", status=row.status, code=row.code, times=None))
    before = COUNTS[row.kind]
    with pytest.raises(StoreError) as caught:
        client(s3.address(proxy.url)).get("v1/a", 10)
    error = caught.value
    assert (error.kind, error.exit_code) == (row.kind, 15)
    assert row.message in str(error)
    assert str(row.status) in str(error)
    assert row.code in str(error)
    assert row.hint in error.hint
    assert COUNTS[row.kind] == before + 1


WRITE_REFUSALS = [row for row in REFUSALS if row.status != 412]
"""412 is the answer to a condition: something is there."""


@pytest.mark.parametrize("row", WRITE_REFUSALS, ids=[f"{row.status} {row.code}" for row in WRITE_REFUSALS])
def test_case_k1_a_refused_write_has_the_same_words_and_nothing_is_written(
    row: Row, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_boto3, "TRIES", 2)
    url = s3.address(proxy.url)
    proxy.add(Fault("status", method="PUT|POST|DELETE", status=row.status, code=row.code, times=None))
    before = COUNTS[row.kind]
    acts = (lambda store: store.put_if_absent("v1/a", b"x"), lambda store: store.put_hint("v1/a", b"x"))
    for number, act in enumerate(acts, start=1):
        with pytest.raises(StoreError) as caught:
            act(open_store(url))
        error = caught.value
        assert (error.kind, error.exit_code) == (row.kind, 15)
        assert row.message.replace("read", "write") in str(error)
        assert f"{row.status} {row.code}" in str(error)
        assert row.hint.replace("GetObject", "PutObject") in error.hint
        assert COUNTS[row.kind] == before + number
    proxy.clear()
    assert open_store(url).get("v1/a", 1) is None


def test_a_redirect_names_the_region_where_the_s3_bucket_is(proxy: FaultProxy) -> None:
    header = ("x-amz-bucket-region: eu-central-1",)
    proxy.add(Fault("status", status=301, code="PermanentRedirect", headers=header, times=None))
    with pytest.raises(StoreError, match="it is in eu-central-1") as caught:
        boto3_store(s3.address(proxy.url)).put_if_absent("v1/a", b"x")
    assert "AWS_REGION=eu-central-1" in caught.value.hint


ACTIONS: list[tuple[str, Callable[[Store], object], str]] = [
    ("get", lambda store: store.get("v1/a", 1), "s3:GetObject on arn:aws:s3:::cachepipe/"),
    ("head", lambda store: store.head("v1/a"), "s3:GetObject on arn:aws:s3:::cachepipe/"),
    ("put", lambda store: store.put_if_absent("v1/a", b""), "s3:PutObject on arn:aws:s3:::cachepipe/"),
    ("hint", lambda store: store.put_hint("v1/hint", b""), "s3:PutObject on arn:aws:s3:::cachepipe/"),
    ("list", lambda store: list(store.list("v1/")), "s3:ListBucket on arn:aws:s3:::cachepipe "),
    ("delete", lambda store: store.delete("v1/a"), "s3:DeleteObject on arn:aws:s3:::cachepipe/"),
    ("delete_all", lambda store: store.delete_all(["v1/a"]), "s3:DeleteObject on arn:aws:s3:::cachepipe/"),
]


@pytest.mark.parametrize(("name", "act", "right"), ACTIONS, ids=[row[0] for row in ACTIONS])
def test_case_k1_a_403_names_the_missing_right(
    name: str, act: Callable[[Store], object], right: str, proxy: FaultProxy
) -> None:
    proxy.add(Fault("status", status=403, code="AccessDenied", times=None))
    before = COUNTS["forbidden"]
    with pytest.raises(StoreError) as caught:
        act(open_store(s3.address(proxy.url)))
    assert right in f"{caught.value.hint} "
    assert caught.value.kind == "forbidden"
    assert COUNTS["forbidden"] == before + 1


def test_case_k1_a_403_of_an_encrypted_s3_bucket_names_the_right_on_its_key(
    client: Callable[[str], Store], proxy: FaultProxy
) -> None:
    said = "User: … is not authorized to perform: kms:Decrypt on resource: …"
    proxy.add(Fault("status", status=403, code="AccessDenied", message=said, times=None))
    with pytest.raises(StoreError) as caught:
        client(s3.address(proxy.url)).get("v1/a", 10)
    assert "s3:GetObject with kms:Decrypt" in caught.value.hint
    with pytest.raises(StoreError) as caught:
        client(s3.address(proxy.url)).put_if_absent("v1/a", b"x")
    assert "s3:PutObject with kms:GenerateDataKey" in caught.value.hint


def test_a_role_without_rights_is_refused_by_a_real_server(
    s3_server: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment(seaweed.READER).items():
        monkeypatch.setenv(name, value)
    store = open_store(s3.address(s3_server.endpoint))
    for name, act, right in ACTIONS[2:]:
        with pytest.raises(StoreError) as caught:
            act(store)
        assert right.strip() in caught.value.hint, name
    assert store.get("v1/a", 1) is None


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "credentials"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "credentials"),
        ({"CACHEPIPE_S3_UNSIGNED": "true"}, "forbidden"),
    ],
)
def test_wrong_keys_are_told_from_missing_rights(
    changes: dict[str, str],
    kind: str,
    client: Callable[[str], Store],
    s3_server: seaweed.Seaweed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**s3.environment(), **changes}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError) as caught:
        client(s3.address(s3_server.endpoint)).get("v1/a", 1)
    assert caught.value.kind == kind


def test_an_s3_bucket_that_is_absent_is_no_absent_object(
    client: Callable[[str], Store], s3_server: seaweed.Seaweed, proxy: FaultProxy
) -> None:
    url = s3.address(s3_server.endpoint).replace("s3://cachepipe/", "s3://not-there/")
    for act in (
        lambda: client(url).get("v1/a", 1),
        lambda: client(url).put_if_absent("v1/a", b""),
        lambda: list(client(url).list("v1/")),
    ):
        with pytest.raises(StoreError, match="no S3 bucket `not-there`"):
            act()


class Silence(NamedTuple):
    what: str
    endpoint: str
    environment: dict[str, str]
    hint: str


SILENCES = [
    Silence("nobody listens", "http://127.0.0.1:1", {}, "address"),
    Silence("the host is not known", "http://s3.invalid", {}, "the host is not known"),
    Silence("a server without https", "https://127.0.0.1:{http}", {}, "does not speak https"),
    Silence("a certificate of a stranger", "https://localhost:{https}", {}, "AWS_CA_BUNDLE"),
    Silence(
        "the same where obstore alone is told to trust anybody",
        "https://localhost:{https}",
        {"AWS_ALLOW_INVALID_CERTIFICATES": "true"},
        "AWS_CA_BUNDLE",
    ),
    Silence(
        "a dead proxy",
        "http://s3.example.com",
        {"HTTP_PROXY": "http://127.0.0.1:1"},
        "through the proxy http://127.0.0.1:1",
    ),
]


@pytest.mark.parametrize("row", SILENCES, ids=[row.what for row in SILENCES])
def test_case_k1_a_store_that_cannot_be_used_says_what_to_look_at(
    row: Silence, client: Callable[[str], Store], s3_server: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name == "AWS_CA_BUNDLE"]:
        monkeypatch.delenv(name)
    for name, value in {**s3.environment(), **row.environment}.items():
        monkeypatch.setenv(name, value)
    for module in (s3_read, s3_boto3):
        monkeypatch.setattr(module, "TRIES", 1)
    s3_read._one_reader.cache_clear()
    before = COUNTS["unusable"]
    endpoint = row.endpoint.format(http=s3_server.ports[0], https=s3_server.ports[1])
    with pytest.raises(StoreError, match="the store does not answer") as caught:
        client(s3.address(endpoint)).get("v1/a", 1)
    assert (caught.value.kind, caught.value.exit_code) == ("unusable", 15)
    assert row.hint in caught.value.hint
    assert "Connection(" not in str(caught.value)
    assert COUNTS["unusable"] == before + 1


def test_case_k6_a_short_object_or_a_page_in_its_place_is_no_object(
    client: Callable[[str], Store], proxy: FaultProxy
) -> None:
    url = s3.address(proxy.url)
    client(url).put_if_absent("v1/a", b"x" * 100)
    proxy.add(Fault("truncate", method="GET", at=40, times=2))
    assert client(url).get("v1/a", 100) == b"x" * 100, "a body that breaks off is read again or on"
    proxy.add(Fault("longer", method="GET", at=1))
    with pytest.raises(IntegrityError, match="too long"):
        client(url).get("v1/a", 100)


def test_case_k6_a_body_that_always_breaks_off_is_no_object(
    client: Callable[[str], Store], proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (s3_read, s3_boto3):
        monkeypatch.setattr(module, "TRIES", 2)
    s3_read._one_reader.cache_clear()
    url = s3.address(proxy.url)
    boto3_store(url).put_if_absent("v1/a", b"x" * 100)
    proxy.add(Fault("truncate", method="GET", at=0, times=None))
    with pytest.raises(StoreError, match="does not answer") as caught:
        client(url).get("v1/a", 100)
    assert caught.value.kind == "unusable"


def test_an_authority_that_cannot_be_read_is_named(
    client: Callable[[str], Store], s3_server: seaweed.Seaweed, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nonexistent/ca.pem")
    with pytest.raises(StoreError, match=r"/nonexistent/ca\.pem") as caught:
        client(s3.address(s3_server.tls_endpoint)).get("v1/a", 1)
    assert "AWS_CA_BUNDLE" in str(caught.value) + caught.value.hint


# --- writes ------------------------------------------------------------------------------------------------------------


def test_a_write_whose_answer_is_lost_is_known_as_ours(proxy: FaultProxy) -> None:
    store = open_store(s3.address(proxy.url))
    proxy.add(Fault("lost", method="PUT"))
    assert store.put_if_absent("v1/a", b"mine") is True
    assert proxy.count("PUT") == 2, "boto3 tried again and got 412 for its own write"
    assert store.put_if_absent("v1/a", b"mine") is False


def test_a_write_that_another_one_beat_while_its_answer_was_lost_is_not_ours(proxy: FaultProxy) -> None:
    url = s3.address(proxy.url)
    open_store(url).put_if_absent("v1/a", b"mine")
    proxy.add(Fault("drop", method="PUT"))
    assert open_store(url).put_if_absent("v1/a", b"mine") is False, "equal bytes of another writer are not ours"


def test_a_write_that_was_carried_out_before_the_store_broke_is_known_as_ours(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_boto3, "TRIES", 2)
    store = open_store(s3.address(proxy.url))
    proxy.add(Fault("lost", method="PUT"))
    proxy.add(Fault("status", method="PUT", status=503, code="SlowDown", times=None))
    assert store.put_if_absent("v1/a", b"mine") is True
    with pytest.raises(StoreError, match="503 SlowDown"):
        store.put_if_absent("v1/b", b"never there")
    proxy.add(Fault("drop", method="HEAD", times=None))
    with pytest.raises(StoreError, match="503 SlowDown"):
        store.put_if_absent("v1/c", b"nobody can tell")
    proxy.clear()
    assert [store.get(key, 9) for key in ("v1/a", "v1/b", "v1/c")] == [b"mine", None, None]


@pytest.mark.parametrize("is_told", [True, False])
def test_where_the_answer_tells_no_digest_the_object_is_looked_at(is_told: bool, proxy: FaultProxy) -> None:
    store = open_store(s3.address(proxy.url))
    proxy.add(Fault("bare", method="PUT", times=None))
    proxy.add(Fault("bare", method="HEAD", times=0 if is_told else None))
    assert store.put_if_absent("v1/a", b"x" * 1000) is True
    assert [row.method for row in proxy.requests()] == (["PUT", "HEAD"] if is_told else ["PUT", "HEAD", "GET"])
    proxy.add(Fault("stale", method="GET", content=b"y" * 1000))
    proxy.add(Fault("absent", method="HEAD"))
    with pytest.raises(IntegrityError, match="stored with other bytes"):
        store.put_if_absent("v1/b", b"x" * 1000)


def test_a_conflict_is_tried_again(proxy: FaultProxy) -> None:
    proxy.add(Fault("status", method="PUT", status=409, code="ConditionalRequestConflict", times=2))
    assert open_store(s3.address(proxy.url)).put_if_absent("v1/a", b"x") is True
    assert proxy.count("PUT") == 3


def test_a_write_asks_once_and_lets_the_server_check_its_digest(proxy: FaultProxy) -> None:
    assert open_store(s3.address(proxy.url)).put_if_absent("v1/a", b"x" * (9 << 20)) is True
    assert [row.method for row in proxy.requests()] == ["PUT"]
    assert not proxy.requests(path="uploadId|uploads"), "never multipart"


def test_a_body_that_was_damaged_on_the_way_is_not_stored(proxy: FaultProxy) -> None:
    store = open_store(s3.address(proxy.url))
    proxy.add(Fault("flip", method="PUT", at=3))
    with pytest.raises(StoreError):
        store.put_if_absent("v1/a", b"x" * 1000)
    assert store.get("v1/a", 1000) is None


def test_without_checksums_what_was_written_is_read_back(proxy: FaultProxy) -> None:
    store = open_store(s3.address(proxy.url, checksums="false"))
    assert store.put_if_absent("v1/a", b"x" * 1000) is True
    assert [row.method for row in proxy.requests()] == ["PUT", "GET"]
    proxy.add(Fault("stale", method="GET", content=b"y" * 1000))
    with pytest.raises(IntegrityError, match="stored with other bytes"):
        store.put_if_absent("v1/b", b"x" * 1000)
    proxy.clear()
    assert store.delete_all(["v1/a", "v1/b"]) == 2
    assert [row.method for row in proxy.requests()] == ["DELETE", "DELETE"], "no DeleteObjects, which wants a checksum"
    assert list(store.list("")) == []


def test_a_server_that_refuses_checksums_serves_a_whole_life_of_a_store_without_them(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    refusing = Fault("status", header="x-amz-(sdk-)?(checksum|trailer)|content-md5", status=501, code="NotImplemented")
    proxy.add(replace(refusing, times=None))
    with pytest.raises(StoreError, match="501 NotImplemented") as caught:
        open_store(s3.address(proxy.url)).put_if_absent("v1/a", b"x")
    assert "checksums=false" in caught.value.hint
    proxy.clear()
    refused = proxy.add(replace(refusing, times=None))
    store = s3.opened(s3.address(proxy.url, checksums="false"))
    now = datetime.now(timezone.utc)
    rows = [publish(store, "demo", "candidate", make_artifact(tmp_path, number), now) for number in (1, 2)]
    floors = Floors(unfinished_s=0.0, published_s=0.0, versions=1, pin_s=0.0)
    assert [found.artifact for found in gc(store, floors=floors, deletes=True).removed] == [rows[0].artifact]
    assert fsck(store, now, is_deep=True).problems == ()
    assert (refused.hits, proxy.count("PUT") > 6) == (0, True)


@pytest.mark.nightly
def test_lists_and_deletions_go_beyond_a_thousand(proxy: FaultProxy, tmp_path: Path) -> None:
    store = open_store(s3.address(proxy.url))
    keys = [f"v1/{number:05d}" for number in range(2100)]
    for key in keys:
        store.put_if_absent(key, b"")
    proxy.clear()
    assert list(store.list("v1/")) == keys
    assert proxy.count("GET", "list-type=2") == 3
    assert store.delete_all(keys[:-1]) == 2099
    assert proxy.count("POST", "delete") == 3
    assert list(store.list("v1/")) == keys[-1:]
