"""An S3 store with boto3: writing, listing, deleting, and reading where only boto3 knows how.

A write is one PutObject, never multipart: If-None-Match makes it won by one, ChecksumSHA256 makes the server refuse a
damaged body. boto3 tries again after a lost answer and then gets 412 for its own write, so every write carries a nonce in
its metadata, which tells ours from another's.

Source: botocore 1.44.8: mode "standard" retries lost connections, 500, 502, 503, 504 and throttling, not 409; a body that
breaks off while it is read is an exception and no retry.
"""

from __future__ import annotations

import functools
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any

import boto3
import botocore
import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound
from urllib3.exceptions import HTTPError

from cachepipe.adapters.s3_errors import Refusal, no_credentials, refused, unreachable
from cachepipe.adapters.s3_read import authorities
from cachepipe.adapters.s3_settings import CONNECT_S, CREDENTIALS_LIMIT_S, READ_S, TRIES, S3Settings
from cachepipe.adapters.store import StoredObject, Trusting, check_key
from cachepipe.errors import IntegrityError, StoreError

CONNECTIONS = 32
_BROKEN = (BotoCoreError, HTTPError)
"""The second, urllib3's, comes through when the body of an error breaks off."""
_CONNECTION = re.compile(r"(<\S+ object at 0x[0-9a-f]+>|AWSHTTPS?Connection\([^)]*\)): ")
"""urllib3 names the connection in its errors, where the address stands already."""
_NONCE = "cachepipe-nonce"
_PER_DELETE = 1000
"""S3's own limit."""


class S3Store(Trusting):
    """See `cachepipe.adapters.store.Store` for the promises."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._made: Any = None

    @property
    def url(self) -> str:
        return self.settings.url

    # --- reading -------------------------------------------------------------------------------------------------------

    def get(self, key: str, limit_bytes: int) -> bytes | None:
        name = self._name(key)
        for attempt in range(1, TRIES + 1):
            found = self._call("read", key, lambda: self._client.get_object(**name))
            if found is None:
                return None
            size = int(found["ContentLength"])
            if size > limit_bytes:
                found["Body"].close()
                raise IntegrityError(f"object {key}", "too long", wanted=f"<= {limit_bytes} bytes", found=size)
            try:
                data: bytes = found["Body"].read()
            except (*_BROKEN, OSError) as error:  # of a body that broke off: no retry of botocore's covers it
                if attempt == TRIES:
                    raise unreachable(f"the answer broke off {TRIES} times: {error}", self.settings) from error
                _pause(attempt)
                continue
            if len(data) != size:
                raise IntegrityError(f"object {key}", "another length than promised", wanted=size, found=len(data))
            return data
        raise AssertionError("unreachable")

    def head(self, key: str) -> StoredObject | None:
        found = self._head(key)
        if found is None:
            return None
        digest = _hex(found.get("ChecksumSHA256", ""))
        return StoredObject(key, found["ContentLength"], _age_s(found["LastModified"], found), digest)

    def list(self, prefix: str) -> Iterator[str]:
        return (found.key for found in self.list_objects(prefix))

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(folder)
        request = {"Bucket": self.settings.s3_bucket, "Prefix": f"{self.settings.prefix}{prefix}"}
        while True:
            page = self._page(prefix, request)
            for row in page.get("Contents", ()):
                key = row["Key"][len(self.settings.prefix) :]
                yield StoredObject(key, row["Size"], _age_s(row["LastModified"], page), "")
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def _page(self, prefix: str, request: dict[str, str]) -> Any:
        return self._call("list", prefix, lambda: self._client.list_objects_v2(**request))

    # --- writing -------------------------------------------------------------------------------------------------------

    def put_if_absent(self, key: str, data: bytes) -> bool:
        nonce = os.urandom(16).hex()
        request = {**self._name(key), **self._body(data), "IfNoneMatch": "*", "Metadata": {_NONCE: nonce}}
        is_uncertain = False
        """An earlier try may have been carried out although its answer was lost."""
        for attempt in range(1, TRIES + 1):
            try:
                answer = self._client.put_object(**request)
            except ClientError as error:
                status = _status(error)
                is_uncertain |= _retries(error) > 0
                if status == 412:
                    return is_uncertain and self._is_ours(key, nonce)
                if status == 409 and attempt < TRIES:  # S3: another conditional write of this key is under way
                    is_uncertain = True
                    _pause(attempt)
                    continue
                if is_uncertain and self._is_ours_perhaps(key, nonce):
                    return True
                raise self._refused(error, "write", key) from error
            except _BROKEN as error:
                if self._is_ours_perhaps(key, nonce):
                    return True
                raise self._failed(error) from error
            self._check_stored(key, data, request.get("ChecksumSHA256") or _base64(data), answer)
            return True
        raise AssertionError("unreachable")

    def put_hint(self, key: str, data: bytes) -> None:
        request = {**self._name(key), **self._body(data)}
        self._call("write", key, lambda: self._client.put_object(**request))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self._client.delete_object(**self._name(key)))

    def delete_all(self, keys: Iterable[str]) -> int:
        count = 0
        problems: deque[StoreError] = deque()
        rest = iter(keys)
        while batch := tuple(islice(rest, _PER_DELETE)):
            count += len(batch)
            problems += self._delete_batch(batch)
        if problems:
            error = StoreError(f"{len(problems)} of {count} objects could not be removed: {problems[0]}")
            error.hint, error.kind = problems[0].hint, problems[0].kind
            raise error from problems[0]
        return count

    def _delete_batch(self, keys: tuple[str, ...]) -> Sequence[StoreError]:
        problems: deque[StoreError] = deque()
        named = []
        for key in keys:
            try:
                named.append(check_key(key))
                if not self.settings.has_checksums:  # DeleteObjects demands a checksum that such servers do not know
                    self.delete(key)
            except StoreError as error:
                problems.append(error)
        if not named or not self.settings.has_checksums:
            return problems
        prefix = self.settings.prefix
        wanted = {"Objects": [{"Key": f"{prefix}{key}"} for key in named], "Quiet": True}
        answer = self._call(
            "delete", named[0], lambda: self._client.delete_objects(Bucket=self.settings.s3_bucket, Delete=wanted)
        )
        for row in answer.get("Errors", ()):
            code = row.get("Code", "")
            refusal = Refusal(403 if code == "AccessDenied" else 500, code, row.get("Message", ""))
            problems.append(refused(refusal, "delete", row["Key"][len(prefix) :], self.settings))
        return problems

    def sweep(self, age_s: float) -> int:
        """Returns 0: a write is one request, so nothing is ever left half done."""
        return 0

    # --- parts ---------------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> dict[str, str]:
        return {"Bucket": self.settings.s3_bucket, "Key": f"{self.settings.prefix}{check_key(key)}"}

    def _body(self, data: bytes) -> dict[str, Any]:
        return {"Body": data, **({"ChecksumSHA256": _base64(data)} if self.settings.has_checksums else {})}

    def _check_stored(self, key: str, data: bytes, digest: str, answer: dict[str, Any]) -> None:
        """Returns if the server stored these very bytes: by its answer, by what it says of the object, or by reading it.

        Raises:
            IntegrityError: it stored others.
        """
        wanted = (len(data), digest)
        found = (len(data), answer.get("ChecksumSHA256"))  # a server computes it over the whole body
        if self.settings.has_checksums and found[1] is None:
            told = self._head(key) or {}
            found = (told.get("ContentLength", 0), told.get("ChecksumSHA256"))
        if found[1] is None:
            there = self.get(key, len(data)) or b""
            found = (len(there), _base64(there))
        if found != wanted:
            raise IntegrityError(f"object {key}", "stored with other bytes", wanted=wanted, found=found)

    def _head(self, key: str) -> Any:
        mode = {"ChecksumMode": "ENABLED"} if self.settings.has_checksums else {}
        return self._call("read", key, lambda: self._client.head_object(**self._name(key), **mode))

    def _is_ours(self, key: str, nonce: str) -> bool:
        found = self._head(key)
        return found is not None and found.get("Metadata", {}).get(_NONCE) == nonce

    def _is_ours_perhaps(self, key: str, nonce: str) -> bool:
        """As `_is_ours`; False when the store cannot be asked either: then the write's own error counts."""
        try:
            return self._is_ours(key, nonce)
        except StoreError:
            return False

    def _call(self, verb: str, key: str, act: Callable[[], Any]) -> Any:
        """Returns what a call gives, None when the object is absent.

        Raises:
            StoreError: all else, in our words.
        """
        for attempt in range(1, TRIES + 1):
            try:
                return act()
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code", "")
                if verb == "read" and _status(error) == 404 and code != "NoSuchBucket":
                    return None
                if _status(error) == 409 and verb != "read" and attempt < TRIES:
                    _pause(attempt)
                    continue
                raise self._refused(error, verb, key) from error
            except BotoCoreError as error:
                raise self._failed(error) from error
            except HTTPError as error:
                if attempt == TRIES:
                    raise self._failed(error) from error
                _pause(attempt)
        raise AssertionError("unreachable")

    def _refused(self, error: ClientError, verb: str, key: str) -> StoreError:
        told: dict[str, Any] = {**error.response.get("Error", {})}
        code = str(told.get("Code", ""))
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = str(headers.get("x-amz-bucket-region") or told.get("Region", ""))
        refusal = Refusal(_status(error), "" if code.isdigit() else code, str(told.get("Message", "")), region)
        return refused(refusal, verb, key, self.settings)

    def _failed(self, error: Exception) -> StoreError:
        if isinstance(error, NoCredentialsError):
            return no_credentials("all providers of boto3", "none has any", self.settings)
        cause = error.kwargs.get("error") if isinstance(error, BotoCoreError) else None
        text = str(error) if cause is None or str(cause) in str(error) else f"{error}: {cause}"
        return unreachable(_CONNECTION.sub("", text), self.settings)

    @property
    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = _client(self.settings)
            return self._made


def _client(settings: S3Settings) -> Any:
    try:
        core = _core()
        session = boto3.Session(
            botocore_session=core, profile_name=settings.profile or None, region_name=settings.region or None
        )
        if not settings.is_unsigned:
            _look_up_credentials(core, settings)
        region, endpoint = session.region_name or "us-east-1", settings.endpoint or None
        verify = settings.ca_bundle or None
        if verify and not os.path.isdir(verify):  # botocore tells no more than "no such file", after all tries
            authorities(settings)
        made = session.client("s3", region, endpoint_url=endpoint, verify=verify, config=_config(settings))
        made.meta.events.register_last("before-call.s3", _follow_no_redirect)
        return made
    except ProfileNotFound as error:
        raise no_credentials(f"profile `{settings.profile}`", "there is no such profile", settings) from error
    except (BotoCoreError, OSError, ValueError) as error:
        raise unreachable(f"boto3 refuses the settings: {error}", settings) from error


def _follow_no_redirect(context: dict[str, Any], **_: object) -> None:
    """Why: botocore would ask HeadBucket, a right that no role has, 78 times if that is redirected too; obstore follows none."""
    context.setdefault("s3_redirect", {})["redirected"] = True


def _core() -> botocore.session.Session:
    """Returns a fresh session that shares the service models with all others: a second client then takes 11 ms, not 74."""
    core = botocore.session.Session()
    core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
    return core


@functools.cache
def _loader(data_path: str | None) -> Any:
    return botocore.loaders.create_loader(data_path)


def _config(settings: S3Settings) -> Config:
    style: Any = "auto" if settings.is_path_style is None else "path" if settings.is_path_style else "virtual"
    scheme = settings.endpoint.partition("://")[0] or "https"
    options: Any = {"addressing_style": style}
    if settings.has_checksums:
        # Every body then comes with its digest in a signed header. A second one is asked for over http alone, and costs
        # both sides as much again.
        options["payload_signing_enabled"] = False
    return Config(
        signature_version=botocore.UNSIGNED if settings.is_unsigned else "s3v4",
        s3=options,
        retries={"mode": "standard", "total_max_attempts": TRIES},
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        max_pool_connections=CONNECTIONS,
        proxies={scheme: settings.proxy} if settings.proxy else {},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",  # our own digests replace it, for ranges and resumed reads too
    )


def _look_up_credentials(core: Any, settings: S3Settings) -> None:
    """Makes the session get its keys now, under one limit.

    Raises:
        StoreError: there are none, or not within `CREDENTIALS_LIMIT_S`.
    """
    asked = ", ".join(provider.METHOD for provider in core.get_component("credential_provider").providers)
    box: list[Any] = []

    def look() -> None:
        try:
            found = core.get_credentials()
            box.append(found.get_frozen_credentials() if found is not None else None)
        except Exception as error:  # noqa: BLE001 - of a thread: judged below
            box.append(error)

    thread = threading.Thread(target=look, name="credentials", daemon=True)
    thread.start()
    thread.join(CREDENTIALS_LIMIT_S)
    if not box:
        raise no_credentials(asked, f"no answer within {CREDENTIALS_LIMIT_S:g} s", settings)
    if box[0] is None:
        raise no_credentials(asked, "none has any", settings)
    if isinstance(box[0], Exception):
        raise no_credentials(asked, str(box[0]), settings) from box[0]


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _retries(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def _pause(attempt: int) -> None:
    time.sleep(0.05 * 2**attempt * (0.5 + random.random()))


def _age_s(written: datetime, answer: dict[str, Any]) -> float:
    """Returns the age of an object by the clock of the server that tells it, in whole seconds."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(date) if date else datetime.now(written.tzinfo)
    return max(0.0, (now - written).total_seconds())


def _base64(data: bytes) -> str:
    import base64
    import hashlib

    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _hex(digest: str) -> str:
    """Returns the hex digits of a base64 digest; of anything else, such as that of a multipart object, nothing."""
    import base64
    import binascii

    try:
        raw = base64.b64decode(digest, validate=True)
    except binascii.Error:
        return ""
    return raw.hex() if len(raw) == 32 else ""
