"""How long and how often both clients try: the values of the contract, and what a server sees of them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from botocore.retries.standard import ExponentialBackoff

from cachepipe.adapters import s3 as s3_boto3
from cachepipe.adapters import s3_read, s3_settings
from cachepipe.adapters.s3 import S3Store
from cachepipe.adapters.s3_read import S3ReadStore
from cachepipe.adapters.s3_settings import read_settings
from cachepipe.adapters.store import COUNTS, Store
from cachepipe.errors import StoreError
from tests.support import s3, seaweed
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.recorder import SilentServer

LIMIT_S, SOON_S = 0.4, 4.0
"""In place of the contract's seconds, where it is only asked whether a limit holds; a client's own is 5 s or a minute."""


def through_boto3(url: str) -> Store:
    return S3Store(read_settings(url, os.environ))


def through_obstore(url: str) -> Store:
    return S3ReadStore(read_settings(url, os.environ), os.environ)


@pytest.fixture(params=[through_boto3, through_obstore], ids=["boto3", "obstore"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Store]]:
    """Opens a store with one of the clients; nothing is known of AWS but what a test says."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "CACHEPIPE_S3_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3_read._one_reader.cache_clear()
    yield request.param
    s3_read._one_reader.cache_clear()


def limit(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    for module in (s3_read, s3_boto3):
        monkeypatch.setattr(module, name, value)


# --- values --------------------------------------------------------------------------------------------------------------


def test_the_limits_are_those_of_the_contract() -> None:
    found = (s3_settings.CONNECT_S, s3_settings.READ_S, s3_settings.TRIES, s3_settings.CREDENTIALS_LIMIT_S)
    assert found == (2, 10, 5, 5.0)
    for module in (s3_read, s3_boto3):
        used = (module.CONNECT_S, module.READ_S, module.TRIES, module.CREDENTIALS_LIMIT_S)
        assert used == found


@pytest.mark.parametrize("client", [through_boto3], indirect=True)
def test_boto3_is_told_the_limits_and_to_try_again_in_mode_standard(
    client: Callable[[str], S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_RETRY_MODE", "legacy")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    config = client("s3://ml-cache/prod?endpoint=http://127.0.0.1:1")._client.meta.config
    assert (config.connect_timeout, config.read_timeout) == (2, 10)
    assert config.retries == {"mode": "standard", "total_max_attempts": 5}


@pytest.mark.parametrize("client", [through_obstore], indirect=True)
def test_obstore_is_told_the_limits(client: Callable[[str], S3ReadStore]) -> None:
    settings = client("s3://ml-cache/prod?endpoint=http://127.0.0.1:1").settings
    made: Any = s3_read._client(settings, os.environ)
    assert (made.client_options["connect_timeout"], made.client_options["read_timeout"]) == ("2s", "10s")
    assert made.retry_config["max_retries"] == 4
    assert made.retry_config["backoff"]["max_backoff"] == timedelta(seconds=1)


# --- seconds -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def deaf() -> Iterator[str]:
    """The address of a listener whose queue is full: whoever connects waits, as before a firewall that drops."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_host_that_takes_no_connection_is_given_up_within_the_limit(
    client: Callable[[str], Store], deaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "CONNECT_S", LIMIT_S)
    limit(monkeypatch, "TRIES", 1)
    assert LIMIT_S <= seconds_of_failure(client, deaf) < SOON_S


def test_a_server_that_never_answers_is_given_up_within_the_limit(
    client: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "READ_S", LIMIT_S)
    limit(monkeypatch, "TRIES", 1)
    with SilentServer() as silent:
        assert LIMIT_S <= seconds_of_failure(client, silent.url) < SOON_S


def seconds_of_failure(client: Callable[[str], Store], endpoint: str) -> float:
    store = client(s3.address(endpoint))
    with pytest.raises(StoreError):
        client(s3.address("http://127.0.0.1:1")).get("v1/a", 1)  # imports
    began = time.monotonic()
    with pytest.raises(StoreError, match="does not answer") as caught:
        store.get("v1/a", 1)
    assert caught.value.kind == "unusable"
    return time.monotonic() - began


# --- tries ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(s3_server: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    # botocore's pauses between tries grow to 8 s
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    with FaultProxy(s3_server.ports[0]) as started:
        yield started


PASSING = {
    "503": Fault("status", status=503, code="SlowDown", times=None),
    "500": Fault("status", status=500, code="InternalError", times=None),
    "502": Fault("status", status=502, code="BadGateway", times=None),
    "504": Fault("status", status=504, code="GatewayTimeout", times=None),
    "429": Fault("status", status=429, code="TooManyRequests", times=None),
    "a lost connection": Fault("drop", times=None),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_may_pass_is_tried_five_times(fault: str, client: Callable[[str], Store], proxy: FaultProxy) -> None:
    url = s3.address(proxy.url)
    proxy.add(PASSING[fault])
    with pytest.raises(StoreError):
        client(url).get("v1/a", 1)
    assert proxy.count() == 5
    proxy.clear()
    proxy.add(replace(PASSING[fault], times=4, seen=0, hits=0))
    assert client(url).get("v1/a", 1) is None
    assert proxy.count() == 5


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (301, "PermanentRedirect"),
        (400, "ExpiredToken"),
        (403, "AccessDenied"),
        (403, "RequestTimeTooSkewed"),
        (404, "NoSuchBucket"),
        (412, "PreconditionFailed"),
    ],
)
def test_what_will_not_pass_is_tried_once(
    status: int, code: str, client: Callable[[str], Store], proxy: FaultProxy
) -> None:
    proxy.add(Fault("status", status=status, code=code, times=None))
    with pytest.raises(StoreError):
        client(s3.address(proxy.url)).get("v1/a", 1)
    assert proxy.count() == 1


WRITES: dict[str, Callable[[Store], object]] = {
    "put_if_absent": lambda store: store.put_if_absent("v1/a", b"x"),
    "put_hint": lambda store: store.put_hint("v1/a", b"x"),
    "delete": lambda store: store.delete("v1/a"),
    "delete_all": lambda store: store.delete_all(["v1/a"]),
}


@pytest.mark.parametrize("client", [through_boto3], indirect=True)
@pytest.mark.parametrize("name", WRITES)
def test_a_conflict_is_tried_five_times_by_every_write(
    name: str, client: Callable[[str], Store], proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3.address(proxy.url)
    monkeypatch.setattr(s3_boto3, "_pause", lambda _: None)
    proxy.add(Fault("status", status=409, code="ConditionalRequestConflict", times=4))
    WRITES[name](client(url))
    assert proxy.count("PUT|POST|DELETE") == 5
    proxy.clear()
    proxy.add(Fault("status", method="PUT|POST|DELETE", status=409, code="ConditionalRequestConflict", times=None))
    before = COUNTS["conflict"]
    with pytest.raises(StoreError, match="409 ConditionalRequestConflict") as caught:
        WRITES[name](client(url))
    assert (caught.value.kind, COUNTS["conflict"]) == ("conflict", before + 1)
    assert proxy.count("PUT|POST|DELETE") == 5
