"""Reading an S3 store at the speed of a service's start: obstore, loaded when the first object is asked for.

boto3 (`s3.py`) reads in its place where only boto3 knows how (profiles, SSO, FIPS endpoints) or obstore is not installed,
and does all that is not reading. Both get the same settings, so an address means the same with either.

Source: obstore 0.12.1 (object_store 0.12): an `endpoint` argument loses against AWS_ENDPOINT_URL_S3 unless
`aws_endpoint_url_s3` is given too; a body that is cut or stalls is resumed with a range; nothing compares checksums.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cachepipe.adapters.s3_errors import Refusal, no_credentials, refused, unreachable
from cachepipe.adapters.s3_settings import (
    CONNECT_S,
    CREDENTIALS_LIMIT_S,
    READ_S,
    TRIES,
    S3Settings,
    full_endpoint,
    read_settings,
)
from cachepipe.adapters.store import StoredObject, Trusting, check_key
from cachepipe.errors import IntegrityError

if TYPE_CHECKING:
    from cachepipe.adapters.s3 import S3Store

_READ_BY_CLIENTS = ("AWS_", "SSL_")

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_REGION = re.compile(r"<Region>([a-z0-9-]+)</Region>")
_REDIRECT = "Received redirect without LOCATION"
_CAUSES = tuple(
    re.compile(pattern)
    for pattern in (
        r"InvalidCertificate\(\s*(\w+)",
        r'"(dns error)',
        r'message: "([^"]+)"',
        r"(TimedOut|Timeout|IncompleteMessage|UnexpectedEof|InvalidMessage|InvalidContentType|ConnectionReset)",
    )
)


def open_s3(url: str, environment: Mapping[str, str] = os.environ) -> S3ReadStore | S3Store:
    """Returns the store at an `s3://` address; see `s3_settings.py` for what it may say.

    Raises:
        StoreError: not such an address.
    """
    settings = read_settings(url, environment)
    if settings.needs_boto3 or not _has_obstore():
        return _boto3_store(settings)
    return S3ReadStore(settings, environment)


def _has_obstore() -> bool:
    from importlib.util import find_spec

    return find_spec("obstore") is not None


def _boto3_store(settings: S3Settings) -> S3Store:
    from cachepipe.adapters.s3 import S3Store

    return S3Store(settings)


class S3ReadStore(Trusting):
    """Reads with obstore, does all else with boto3; see `cachepipe.adapters.store.Store` for the promises."""

    def __init__(self, settings: S3Settings, environment: Mapping[str, str]) -> None:
        self.settings = settings
        given = {name: value for name, value in environment.items() if name.startswith(_READ_BY_CLIENTS)}
        self._environment = tuple(sorted(given.items()))
        self._lock = threading.Lock()
        self._boto3: S3Store | None = None

    @property
    def url(self) -> str:
        return self.settings.url

    def get(self, key: str, limit_bytes: int) -> bytes | None:
        data = self.view(key, limit_bytes)
        return None if data is None else bytes(data)

    def view(self, key: str, limit_bytes: int) -> memoryview | None:
        """As `get`, without a copy: with 12 fetchers it is 90 MiB less."""
        path = f"{self.settings.prefix}{check_key(key)}"
        client = _reader(self.settings, self._environment)
        import obstore
        from obstore.exceptions import BaseError

        try:
            found = obstore.get(client, path)
            size = found.meta["size"]
            if size > limit_bytes:
                raise IntegrityError(f"object {key}", "too long", wanted=f"<= {limit_bytes} bytes", found=size)
            data = memoryview(found.bytes())
        except (BaseError, FileNotFoundError) as error:
            self._require_absence(error, key)
            return None
        if len(data) != size:
            raise IntegrityError(f"object {key}", "another length than promised", wanted=size, found=len(data))
        return data

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._writer().put_if_absent(key, data)

    def put_hint(self, key: str, data: bytes) -> None:
        self._writer().put_hint(key, data)

    def head(self, key: str) -> StoredObject | None:
        return self._writer().head(key)

    def list(self, prefix: str) -> Iterator[str]:
        return self._writer().list(prefix)

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        return self._writer().list_objects(prefix)

    def delete(self, key: str) -> None:
        self._writer().delete(key)

    def delete_all(self, keys: Iterable[str]) -> int:
        return self._writer().delete_all(keys)

    def sweep(self, age_s: float) -> int:
        return self._writer().sweep(age_s)

    def _writer(self) -> S3Store:
        with self._lock:
            if self._boto3 is None:
                self._boto3 = _boto3_store(self.settings)
            return self._boto3

    def _require_absence(self, error: Exception, key: str) -> None:
        """Returns if the error says that the object is absent, else raises what it means."""
        text = str(error)
        status = _STATUS.search(text)
        if _REDIRECT in text:  # obstore keeps neither its status nor the region that S3 names
            raise refused(Refusal(301, "PermanentRedirect", ""), "read", key, self.settings) from error
        if status is None:
            raise unreachable(_cause(text), self.settings) from error
        refusal = _refusal(int(status[1]), text)
        if refusal.status == 404 and refusal.code != "NoSuchBucket":
            return
        raise refused(refusal, "read", key, self.settings) from error


_LOOKING = threading.Lock()


def _reader(settings: S3Settings, environment: tuple[tuple[str, str], ...]) -> Any:
    """Returns the client of this process for a store, with its keys; the first of several threads makes it."""
    with _LOOKING:
        return _one_reader(settings, environment)


@functools.lru_cache(maxsize=8)
def _one_reader(settings: S3Settings, environment: tuple[tuple[str, str], ...]) -> Any:
    """A restore opens its store twice, to look whether it has all and to fetch: client and connection stay."""
    given = dict(environment)
    client = _client(settings, given)
    if not (settings.is_unsigned or settings.has_static_keys):
        _look_up_credentials(client, settings, given)
    return client


def _client(settings: S3Settings, environment: Mapping[str, str]) -> Any:
    """Returns an obstore client in which everything is said, so that nothing is left to its own reading of variables."""
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    config: dict[str, Any] = {
        "region": settings.region or "us-east-1",
        "virtual_hosted_style_request": not settings.is_path_style,
        "skip_signature": settings.is_unsigned,
        "s3_express": False,
        "request_payer": False,
        "unsigned_payload": False,
        "endpoint": full_endpoint(settings),
        "aws_endpoint_url_s3": full_endpoint(settings),
    }
    if metadata := environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        config["metadata_endpoint"] = metadata.rstrip("/")
    if sts := environment.get("AWS_ENDPOINT_URL_STS"):
        config["endpoint_url_sts"] = sts
    try:
        return S3Store(
            settings.s3_bucket,
            client_options=_client_options(settings),
            retry_config={
                "max_retries": TRIES - 1,
                "retry_timeout": timedelta(seconds=60),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
            **config,
        )
    except (BaseError, ValueError, TypeError) as error:
        raise unreachable(f"obstore refuses the settings: {str(error).splitlines()[0]}", settings) from error


def _client_options(settings: S3Settings) -> Any:
    options: dict[str, Any] = {
        "allow_http": settings.endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=READ_S),
        "timeout": "60s",
        "pool_max_idle_per_host": "64",
    }
    if settings.ca_bundle:
        options["root_certificate"] = authorities(settings)
    if settings.proxy:
        options["proxy_url"] = settings.proxy
    elif settings.has_foreign_proxy:
        # The client would ask the environment by rules of its own; with a proxy that excludes this host it asks nothing.
        options["proxy_url"], options["proxy_excludes"] = (
            "http://127.0.0.1:9",
            urlsplit(full_endpoint(settings)).hostname,
        )
    return options


def authorities(settings: S3Settings) -> str:
    """Returns the certificates to trust.

    Raises:
        StoreError: their file cannot be read.
    """
    try:
        with open(settings.ca_bundle, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError as error:
        problem = f"AWS_CA_BUNDLE `{settings.ca_bundle}` cannot be read ({error.strerror})"
        raise unreachable(problem, settings) from error


def _look_up_credentials(client: Any, settings: S3Settings, environment: Mapping[str, str]) -> None:
    """Makes the client get its keys now, by a signature that nobody uses, under one limit.

    Raises:
        StoreError: there are none, or not within `CREDENTIALS_LIMIT_S`.
    """
    import obstore

    sources = [name for name in ("AWS_WEB_IDENTITY_TOKEN_FILE", *_CONTAINER) if environment.get(name)]
    asked = ", ".join(["environment", *sources] + ([] if sources or not settings.has_metadata_service else [_METADATA]))
    if not sources and not settings.has_metadata_service:
        raise no_credentials(asked, "none there, and the metadata service is switched off", settings)
    box: list[Exception | None] = []

    def look() -> None:
        try:
            obstore.sign(client, "GET", "x", timedelta(seconds=60))
            box.append(None)
        except Exception as error:  # noqa: BLE001 - of a thread: judged below
            box.append(error)

    thread = threading.Thread(target=look, name="credentials", daemon=True)
    thread.start()
    thread.join(CREDENTIALS_LIMIT_S)
    if not box:
        raise no_credentials(asked, f"no answer within {CREDENTIALS_LIMIT_S:g} s", settings)
    if box[0] is not None:
        raise no_credentials(asked, _cause(str(box[0])), settings) from box[0]


_METADATA = "metadata service"
_CONTAINER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")


def _refusal(status: int, text: str) -> Refusal:
    code, message, region = _CODE.search(text), _MESSAGE.search(text), _REGION.search(text)
    return Refusal(status, code[1] if code else "", message[1] if message else "", region[1] if region else "")


def _cause(text: str) -> str:
    """Returns the words of an error text that say what happened; the text is a page of nested structures."""
    first = text.splitlines()[0].rpartition(" - ")[2] if text else "no reason given"
    found = next((match[1] for match in (cause.search(text) for cause in _CAUSES) if match), "")
    if "InvalidCertificate" in text:
        found = f"its certificate is not trusted: {found}"
    return f"{first} ({found})" if found else first
