"""Keys come from the same places for both clients, in the same order, and within one limit of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cachepipe.adapters import s3 as s3_boto3
from cachepipe.adapters import s3_read
from cachepipe.adapters.s3 import S3Store
from cachepipe.adapters.s3_read import S3ReadStore, open_s3
from cachepipe.adapters.s3_settings import read_settings
from cachepipe.adapters.store import COUNTS, Store
from cachepipe.errors import StoreError
from tests.support import seaweed
from tests.support.key_server import ROLE, TOKEN, KeyServer
from tests.support.recorder import Recorder, SilentServer

LIMIT_S, SOON_S = 0.4, 4.0
"""In place of `CREDENTIALS_LIMIT_S`, and what no single place of those that hang would keep by itself."""
STATIC = {"AWS_ACCESS_KEY_ID": "STATIC", "AWS_SECRET_ACCESS_KEY": "secret"}
NO_METADATA = {"AWS_EC2_METADATA_DISABLED": "true"}
INSTANCE = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "{url}"}
CONTAINER = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "{url}/container"}
AGENT = {
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "{url}/agent",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "{token_file}",
}
GIVEN_AGENT = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "{url}/agent", "AWS_CONTAINER_AUTHORIZATION_TOKEN": TOKEN}
WEB_IDENTITY = {
    "AWS_WEB_IDENTITY_TOKEN_FILE": "{token_file}",
    "AWS_ROLE_ARN": ROLE,
    "AWS_ENDPOINT_URL_STS": "{tls_url}",
}


class Row(NamedTuple):
    what: str
    environment: dict[str, str]
    key: str


TABLE = [
    Row("the role of an instance", INSTANCE, "INSTANCE"),
    Row("the role of a container", {**CONTAINER, **NO_METADATA}, "CONTAINER"),
    Row("the role of a pod by its agent", {**AGENT, **NO_METADATA}, "AGENT"),
    Row("the same with the token itself", {**GIVEN_AGENT, **NO_METADATA}, "AGENT"),
    Row("the role of a pod by web identity", {**WEB_IDENTITY, **NO_METADATA}, "WEBIDENTITY"),
    Row("a container wins over its instance", {**CONTAINER, **INSTANCE}, "CONTAINER"),
    Row("web identity wins over a container", {**WEB_IDENTITY, **AGENT, **INSTANCE}, "WEBIDENTITY"),
    Row("keys win over all", {**STATIC, **WEB_IDENTITY, **CONTAINER, **INSTANCE}, "STATIC"),
    Row("a secret without an access key is nothing", {"AWS_SECRET_ACCESS_KEY": "secret", **INSTANCE}, "INSTANCE"),
    Row("a token under another name is nothing", {**STATIC, "AWS_TOKEN": "other"}, "STATIC"),
    Row("another service's address is nothing to keys", {**STATIC, "AWS_ENDPOINT_URL_STS": "{tls_url}"}, "STATIC"),
]


def as_a_restore_reads(url: str) -> Store:
    return open_s3(url)


def as_a_publisher_writes(url: str) -> Store:
    return S3Store(read_settings(url, os.environ))


@pytest.fixture(params=[as_a_restore_reads, as_a_publisher_writes])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Store]:
    """Opens a store; nothing is known of AWS but what a test says."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "CACHEPIPE_S3_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # without ~/.aws
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def servers(
    s3_server: seaweed.Seaweed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[KeyServer, KeyServer]]:
    folder, certificates = tmp_path_factory.mktemp("keys"), s3_server.ca_bundle.parent
    with (
        KeyServer(folder) as plain,
        KeyServer(folder, (certificates / "server.pem", certificates / "server.key")) as tls,
    ):
        yield plain, tls


@pytest.mark.parametrize("row", TABLE, ids=[row.what for row in TABLE])
def test_keys_come_from_the_same_place_for_both_clients(
    row: Row,
    client: Callable[[str], Store],
    servers: tuple[KeyServer, KeyServer],
    s3_server: seaweed.Seaweed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, tls = servers
    monkeypatch.setenv("AWS_CA_BUNDLE", str(s3_server.ca_bundle))
    for name, value in row.environment.items():
        monkeypatch.setenv(name, value.format(url=plain.url, tls_url=tls.url, token_file=plain.token_file))
    with Recorder() as recorder:
        assert client(f"s3://ml-cache/prod?endpoint={recorder.url}").get("v1/a", 1) is None
    (seen,) = recorder.seen
    assert (seen.access_key, seen.token) == (row.key, "" if row.key == "STATIC" else f"of {row.key}")


def test_an_access_key_without_its_secret_is_an_error_and_nothing_else_is_asked(
    client: Callable[[str], Store], servers: tuple[KeyServer, KeyServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "STATIC")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", servers[0].url)
    before = COUNTS["credentials"]
    with Recorder() as recorder, pytest.raises(StoreError, match="missing: AWS_SECRET_ACCESS_KEY") as caught:
        client(f"s3://ml-cache/prod?endpoint={recorder.url}").get("v1/a", 1)
    assert recorder.seen == []
    assert (caught.value.kind, COUNTS["credentials"]) == ("credentials", before + 1)


SILENT = {
    "instance": {**INSTANCE, "AWS_METADATA_SERVICE_TIMEOUT": "5", "AWS_METADATA_SERVICE_NUM_ATTEMPTS": "4"},
    "container": {**CONTAINER, **NO_METADATA},
    "agent": {**AGENT, **NO_METADATA},
    "web identity": {**WEB_IDENTITY, **NO_METADATA},
}
SILENT["all together"] = {**SILENT["instance"], **AGENT, **WEB_IDENTITY}


@pytest.mark.parametrize("place", SILENT)
def test_case_k3_places_of_keys_that_hang_cost_no_more_than_the_limit_together(
    place: str,
    client: Callable[[str], Store],
    servers: tuple[KeyServer, KeyServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (s3_read, s3_boto3):
        monkeypatch.setattr(module, "CREDENTIALS_LIMIT_S", LIMIT_S)
    with SilentServer() as silent:
        words = {
            "url": silent.url,
            "tls_url": silent.url.replace("http:", "https:"),
            "token_file": servers[0].token_file,
        }
        for name, value in SILENT[place].items():
            monkeypatch.setenv(name, value.format(**words))
        before, began = COUNTS["credentials"], time.monotonic()
        with pytest.raises(StoreError, match=r"no answer within 0\.4 s; asked: ") as caught:
            client("s3://ml-cache/prod?endpoint=http://127.0.0.1:1").get("v1/a", 10)
        assert LIMIT_S <= time.monotonic() - began < SOON_S
        assert (caught.value.kind, COUNTS["credentials"]) == ("credentials", before + 1)


def test_obstore_reads_wherever_it_finds_the_same_keys(tmp_path: Path) -> None:
    """boto3's import is 0.3 s of a service's start."""
    url, quiet = "s3://ml-cache/prod", {"HOME": str(tmp_path)}
    for environment in (INSTANCE, AGENT, WEB_IDENTITY, STATIC, {**CONTAINER, **STATIC}):
        assert isinstance(open_s3(url, {**quiet, **environment}), S3ReadStore), environment
    assert isinstance(open_s3(f"{url}?unsigned=true", {**quiet, **CONTAINER}), S3ReadStore)
    for environment in (CONTAINER, GIVEN_AGENT, {"AWS_WEB_IDENTITY_TOKEN_FILE": "x"}, {"AWS_ACCESS_KEY_ID": "x"}):
        assert isinstance(open_s3(url, {**quiet, **environment}), S3Store), environment
