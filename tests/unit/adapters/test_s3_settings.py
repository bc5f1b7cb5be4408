"""An address and an environment mean the same to both clients; what is asked is seen by a server, not by looking inside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cachepipe.adapters import s3 as s3_boto3
from cachepipe.adapters import s3_read
from cachepipe.adapters.s3 import S3Store
from cachepipe.adapters.s3_read import S3ReadStore, open_s3
from cachepipe.adapters.s3_settings import proxy_for, read_settings
from cachepipe.adapters.store import COUNTS, Store
from cachepipe.errors import StoreError
from tests.support.recorder import Recorder, Seen

KEYS = {"AWS_ACCESS_KEY_ID": "AKEY", "AWS_SECRET_ACCESS_KEY": "secret"}
NO_FILES = {"AWS_CONFIG_FILE": "/nonexistent/config", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials"}
QUIET = {**NO_FILES, "AWS_EC2_METADATA_DISABLED": "true"}
PATH = "ml-cache/prod/v1/format.json"


def through_boto3(url: str) -> Store:
    return S3Store(read_settings(url, os.environ))


def through_obstore(url: str) -> Store:
    return S3ReadStore(read_settings(url, os.environ), os.environ)


@pytest.fixture(params=[through_boto3, through_obstore], ids=["boto3", "obstore"])
def client(request: pytest.FixtureRequest) -> Callable[[str], Store]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as started:
        yield started


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of AWS's or of a proxy's is left from whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "CACHEPIPE_S3_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


class Row(NamedTuple):
    what: str
    parameters: str
    """Of the address; `{url}` is the server's."""
    environment: dict[str, str]
    wanted: Seen


def direct(host: str = "{host}", region: str = "us-east-1", key: str = "AKEY", token: str = "") -> Seen:
    return Seen(f"http://{host}/{PATH}", False, key, region, token)


def proxied(host: str, path: str = PATH) -> Seen:
    return Seen(f"http://{host}/{path}", True, "AKEY", "us-east-1", "")


DEAD = "http://127.0.0.1:1"
ELSEWHERE = "http%3A%2F%2Fs3.example.com"
TABLE = [
    Row("an endpoint in the address", "endpoint={url}", {}, direct()),
    Row("an endpoint for all of AWS", "", {"AWS_ENDPOINT_URL": "{url}"}, direct()),
    Row("an endpoint for S3", "", {"AWS_ENDPOINT_URL_S3": "{url}"}, direct()),
    Row("S3's wins over AWS's", "", {"AWS_ENDPOINT_URL_S3": "{url}", "AWS_ENDPOINT_URL": DEAD}, direct()),
    Row(
        "the address wins over both",
        "endpoint={url}",
        {"AWS_ENDPOINT_URL_S3": DEAD, "AWS_ENDPOINT_URL": DEAD},
        direct(),
    ),
    Row("a slash at its end is nothing", "", {"AWS_ENDPOINT_URL": "{url}/"}, direct()),
    Row(
        "endpoints of the environment are ignored on demand, that of the address is not",
        "endpoint={url}",
        {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true", "AWS_ENDPOINT_URL": DEAD},
        direct(),
    ),
    Row("AWS_REGION", "endpoint={url}", {"AWS_REGION": "eu-central-1"}, direct(region="eu-central-1")),
    Row("AWS_DEFAULT_REGION", "endpoint={url}", {"AWS_DEFAULT_REGION": "eu-west-3"}, direct(region="eu-west-3")),
    Row(
        "AWS_REGION wins over AWS_DEFAULT_REGION",
        "endpoint={url}",
        {"AWS_REGION": "eu-central-1", "AWS_DEFAULT_REGION": "eu-west-3"},
        direct(region="eu-central-1"),
    ),
    Row(
        "the address's region wins",
        "endpoint={url}&region=ap-south-1",
        {"AWS_REGION": "x"},
        direct(region="ap-south-1"),
    ),
    Row("a session token", "endpoint={url}", {"AWS_SESSION_TOKEN": "T0ken"}, direct(token="T0ken")),
    Row("unsigned by the address", "endpoint={url}&unsigned=true", {}, direct(key="", region="")),
    Row("unsigned by the environment", "endpoint={url}", {"CACHEPIPE_S3_UNSIGNED": "1"}, direct(key="", region="")),
    Row(
        "the address wins over the environment",
        "endpoint={url}&unsigned=false",
        {"CACHEPIPE_S3_UNSIGNED": "1"},
        direct(),
    ),
    Row("a proxy", f"endpoint={ELSEWHERE}", {"HTTP_PROXY": "{url}"}, proxied("s3.example.com")),
    Row("a proxy in small letters", f"endpoint={ELSEWHERE}", {"http_proxy": "{url}"}, proxied("s3.example.com")),
    Row(
        "the S3 bucket in the host's name",
        f"endpoint={ELSEWHERE}&path_style=false",
        {"HTTP_PROXY": "{url}"},
        proxied("ml-cache.s3.example.com", "prod/v1/format.json"),
    ),
    Row(
        "the same by the environment",
        f"endpoint={ELSEWHERE}",
        {"HTTP_PROXY": "{url}", "CACHEPIPE_S3_PATH_STYLE": "false"},
        proxied("ml-cache.s3.example.com", "prod/v1/format.json"),
    ),
    Row("no proxy for a host", "endpoint={url}", {"HTTP_PROXY": DEAD, "NO_PROXY": "a.b,127.0.0.1"}, direct()),
    Row("no proxy for a network", "endpoint={url}", {"HTTP_PROXY": DEAD, "NO_PROXY": "127.0.0.0/8"}, direct()),
    Row("no proxy for all", "endpoint={url}", {"HTTP_PROXY": DEAD, "NO_PROXY": "*"}, direct()),
    Row("no proxy, with a port", "endpoint={url}", {"HTTP_PROXY": DEAD, "no_proxy": "127.0.0.1:80"}, direct()),
    Row(
        "a proxy when only others go without",
        f"endpoint={ELSEWHERE}",
        {"HTTP_PROXY": "{url}", "NO_PROXY": "example.org,.internal,10.0.0.0/8"},
        proxied("s3.example.com"),
    ),
    Row("another scheme's proxy is none", "endpoint={url}", {"HTTPS_PROXY": DEAD}, direct()),
    Row("ALL_PROXY is no variable of AWS's", "endpoint={url}", {"ALL_PROXY": DEAD}, direct()),
    Row(
        "variables that only one client knows change nothing",
        "endpoint={url}",
        {
            "AWS_SKIP_SIGNATURE": "true",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
            "AWS_ENDPOINT": DEAD,
            "AWS_ALLOW_HTTP": "false",
            "AWS_BUCKET": "other",
            "AWS_BUCKET_NAME": "other",
            "AWS_PROXY_URL": DEAD,
            "AWS_TIMEOUT": "1 nanosecond",
            "AWS_CONNECT_TIMEOUT": "1 nanosecond",
            "AWS_UNSIGNED_PAYLOAD": "true",
            "AWS_S3_EXPRESS": "true",
            "AWS_REQUEST_PAYER": "true",
        },
        direct(),
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=[row.what for row in TABLE])
def test_an_address_and_an_environment_mean_the_same_to_both_clients(
    row: Row, client: Callable[[str], Store], recorder: Recorder, no_aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**KEYS, **QUIET, **row.environment}.items():
        monkeypatch.setenv(name, value.replace("{url}", recorder.url))
    url = "s3://ml-cache/prod?" + row.parameters.replace("{url}", recorder.url)
    assert client(url.rstrip("?")).get("v1/format.json", 10) is None
    (seen,) = recorder.seen
    assert seen == row.wanted._replace(url=row.wanted.url.replace("{host}", f"127.0.0.1:{recorder.port}"))


def test_without_an_endpoint_both_ask_aws_itself(
    client: Callable[[str], Store], recorder: Recorder, no_aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**KEYS, **QUIET, "HTTPS_PROXY": recorder.url, "AWS_ENDPOINT": DEAD}.items():
        monkeypatch.setenv(name, value)
    for module in (s3_read, s3_boto3):
        monkeypatch.setattr(module, "TRIES", 1)
    with pytest.raises(StoreError):  # the recorder is no proxy that opens tunnels
        client("s3://ml-cache/prod?region=eu-central-1").get("v1/format.json", 10)
    assert "ml-cache.s3.eu-central-1.amazonaws.com:443" in recorder.seen[0].url


# --- profiles ----------------------------------------------------------------------------------------------------------

CONFIG = """[default]
region = eu-north-1
aws_access_key_id = DEFAULT
aws_secret_access_key = s
endpoint_url = {url}
[profile ci]
region = eu-south-2
aws_access_key_id = OFCI
aws_secret_access_key = s
endpoint_url = {url}
"""


@pytest.mark.parametrize(
    ("parameters", "environment", "key", "region"),
    [
        ("", {}, "DEFAULT", "eu-north-1"),
        ("profile=ci", {}, "OFCI", "eu-south-2"),
        ("", {"AWS_PROFILE": "ci"}, "OFCI", "eu-south-2"),
        ("profile=ci", {"AWS_PROFILE": "default"}, "OFCI", "eu-south-2"),
        ("profile=ci&region=us-west-2", {}, "OFCI", "us-west-2"),
        ("profile=ci", {"AWS_REGION": "us-west-2"}, "OFCI", "us-west-2"),
        ("", KEYS, "AKEY", "eu-north-1"),
    ],
)
def test_a_profile_gives_keys_region_and_endpoint(
    parameters: str,
    environment: dict[str, str],
    key: str,
    region: str,
    recorder: Recorder,
    no_aws: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "config").write_text(CONFIG.format(url=recorder.url))
    for name, value in {**QUIET, "AWS_CONFIG_FILE": str(tmp_path / "config"), **environment}.items():
        monkeypatch.setenv(name, value)
    assert open_s3(f"s3://ml-cache/prod?{parameters}".rstrip("?")).get("v1/format.json", 10) is None
    (seen,) = recorder.seen
    assert (seen.access_key, seen.region) == (key, region)


def test_a_profile_that_is_absent_is_named(no_aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match="profile `nobody`") as caught:
        open_s3("s3://ml-cache/prod?profile=nobody").get("v1/a", 10)
    assert caught.value.kind == "credentials"


def test_a_profile_with_single_sign_on_says_that_a_login_is_wanted(
    no_aws: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(
        "[profile sso]\nsso_session = s\nsso_account_id = 1\nsso_role_name = r\n"
        "[sso-session s]\nsso_region = us-east-1\nsso_start_url = https://example.com/start\n"
    )
    for name, value in {**QUIET, "AWS_CONFIG_FILE": str(tmp_path / "config"), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=r"(?i)sso") as caught:
        open_s3("s3://ml-cache/prod?profile=sso").get("v1/a", 10)
    assert caught.value.kind == "credentials"


# --- credentials -------------------------------------------------------------------------------------------------------


def test_without_keys_the_places_that_were_asked_are_named(
    client: Callable[[str], Store], no_aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    before = COUNTS["credentials"]
    with pytest.raises(StoreError, match=r"no keys for s3://ml-cache/prod.*asked: env") as caught:
        client("s3://ml-cache/prod?endpoint=http://127.0.0.1:1").get("v1/a", 10)
    assert caught.value.kind == "credentials"
    assert COUNTS["credentials"] == before + 1


def test_without_obstore_boto3_reads(monkeypatch: pytest.MonkeyPatch, no_aws: None) -> None:
    for name, value in {**KEYS, **QUIET}.items():
        monkeypatch.setenv(name, value)
    assert isinstance(open_s3("s3://ml-cache/prod"), S3ReadStore)
    monkeypatch.setattr(s3_read, "_has_obstore", lambda: False)
    assert isinstance(open_s3("s3://ml-cache/prod"), S3Store)


# --- addresses ---------------------------------------------------------------------------------------------------------

WRONG = [
    "s3://",
    "s3://UPPER_and_so_on/../x",
    "s3://ml-cache/a//b",
    "s3://ml-cache/.hidden",
    "s3://ml-cache/prod?regoin=x",
    "s3://ml-cache/prod?region=",
    "s3://ml-cache/prod?region=a&region=b",
    "s3://ml-cache/prod?unsigned=maybe",
    "s3://ml-cache/prod?endpoint=ftp://x",
    "s3://ml-cache/prod?endpoint=http://x/path",
    "s3://ml-cache/prod?endpoint=http://x:y",
    "s3://ml-cache/prod#x",
    "s3://arn:aws:s3:x/prod",
]


@pytest.mark.parametrize("url", WRONG)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(StoreError):
        read_settings(url, {})


def test_keys_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(StoreError) as caught:
        read_settings("s3://AKEY:hunter2@ml-cache/prod", {})
    assert "hunter2" not in str(caught.value) + caught.value.hint
    with pytest.raises(StoreError) as caught:
        read_settings("s3://ml-cache/prod?endpoint=https://me:hunter2@host", {})
    assert "hunter2" not in str(caught.value) + caught.value.hint


def test_an_unknown_parameter_lists_the_known_ones() -> None:
    with pytest.raises(StoreError) as caught:
        read_settings("s3://ml-cache/prod?regoin=x", {})
    assert "region" in caught.value.hint


def test_the_url_for_messages_holds_neither_parameters_nor_a_slash() -> None:
    settings = read_settings("s3://ml-cache/prod/?endpoint=http://h:1&region=r", {})
    assert (settings.url, settings.prefix) == ("s3://ml-cache/prod", "prod/")
    assert read_settings("s3://ml-cache", {}).url == "s3://ml-cache"


@pytest.mark.parametrize(
    ("host", "excluded", "is_proxied"),
    [
        ("s3.example.com", "", True),
        ("s3.example.com", "example.com", False),
        ("s3.example.com", ".example.com", False),
        ("s3.example.com", "S3.EXAMPLE.COM", False),
        ("badexample.com", "example.com", True),
        ("s3.example.com", " other , example.com ", False),
        ("10.1.2.3", "10.0.0.0/8", False),
        ("11.1.2.3", "10.0.0.0/8", True),
        ("s3.example.com", "10.0.0.0/8", True),
        ("s3.example.com", "not/a/network", True),
        ("anything", "*", False),
    ],
)
def test_no_proxy_names_hosts_domains_and_networks(host: str, excluded: str, is_proxied: bool) -> None:
    found = proxy_for("https", host, {"HTTPS_PROXY": "proxy:3128", "NO_PROXY": excluded})
    assert found == ("http://proxy:3128" if is_proxied else "")
