"""What an S3 server's refusal means, in our words: one translation for both clients, each kind counted.

Source: the API reference's list of S3 error codes; answers of SeaweedFS 4.48 and of the fault proxy in the tests.
"""

from __future__ import annotations

from typing import NamedTuple

from cachepipe.adapters.s3_settings import S3Settings
from cachepipe.adapters.store import COUNTS
from cachepipe.errors import StoreError

ACTIONS = {
    "read": "s3:GetObject",
    "write": "s3:PutObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}
"""What a method does → the right that it needs."""

_CREDENTIAL_CODES = {
    "ExpiredToken": "the session token has expired",
    "ExpiredTokenException": "the session token has expired",
    "TokenRefreshRequired": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "InvalidAccessKeyId": "the store does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key, or a proxy changes requests",
    "RequestTimeTooSkewed": "this machine's clock differs from the store's by more than 15 minutes",
    "RequestExpired": "this machine's clock differs from the store's by more than 15 minutes",
}
_REDIRECT_CODES = ("PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed")
_BUSY = (429, 500, 502, 503, 504)


class Refusal(NamedTuple):
    """An answer of the server that is no success."""

    status: int
    code: str
    """S3's own word for it; empty: none was given, as to a HEAD."""
    message: str
    region: str = ""
    """Where the S3 bucket is, if the answer says so."""


def refused(refusal: Refusal, verb: str, key: str, settings: S3Settings) -> StoreError:
    """Returns the error for a refusal, and counts it.

    Args:
        refusal: what the server said.
        verb: one of `ACTIONS`.
        key: of the object, or the prefix of a list.
        settings: of the store.
    """
    status, code = refusal.status, refusal.code
    what = f"`{key}` in {settings.where}"
    said = f"{status} {code}".strip()
    if status in (301, 307, 308) or code in _REDIRECT_CODES:
        region = f": it is in {refusal.region}" if refusal.region else ""
        return _counted(
            "redirect",
            f"{said}: the S3 bucket `{settings.s3_bucket}` is not in region `{settings.region or 'us-east-1'}`{region}",
            f"set AWS_REGION{'=' + refusal.region if refusal.region else ''}, or `?region=` in the store's address",
        )
    if code in _CREDENTIAL_CODES:
        return _counted(
            "credentials",
            f"{said}: {_CREDENTIAL_CODES[code]}: {settings.where}",
            "give this process fresh keys"
            if "clock" not in _CREDENTIAL_CODES[code]
            else "set the clock of this machine",
        )
    if status in (401, 403):
        return _forbidden(refusal, verb, key, settings)
    if code == "NoSuchBucket":
        return _counted(
            "no_bucket",
            f"{said}: there is no S3 bucket `{settings.s3_bucket}`: {settings.where}",
            "create it, or correct the store's address; cachepipe never creates one",
        )
    if status in (409, 412):
        return _counted(
            "conflict", f"{said}: others write the same object, again and again: {what}", "run the command again"
        )
    if status in _BUSY:
        return _counted(
            "slow_down",
            f"{said}: the store is overloaded or broken, after all tries: {what}",
            "run the command again; if it lasts, look at the store",
        )
    detail = f" ({refusal.message[:200]})" if refusal.message else ""
    hint = None
    if settings.has_checksums and (status == 501 or ("checksum" in detail.lower() and code != "BadDigest")):
        hint = "for a server without SHA-256 checksums add `?checksums=false` to the store's address"
    return _counted("unusable", f"{said}: cannot {verb} {what}{detail}", hint)


def _forbidden(refusal: Refusal, verb: str, key: str, settings: S3Settings) -> StoreError:
    action = ACTIONS[verb]
    resource = f"{settings.s3_bucket}/{settings.prefix}{key}" if verb != "list" else settings.s3_bucket
    more = " (or it is absent: without s3:ListBucket the store does not tell)" if verb == "read" else ""
    if "kms" in refusal.message.lower():
        action, more = f"{action} with {'kms:GenerateDataKey' if verb == 'write' else 'kms:Decrypt'}", ""
    said = f"{refusal.status} {refusal.code or 'Forbidden'}"
    return _counted(
        "forbidden",
        f"{said}: no right to {verb} `{key}`{more}: {settings.where}",
        f"allow {action} on arn:aws:s3:::{resource} to the role of this process",
    )


def no_credentials(asked: str, problem: str, settings: S3Settings) -> StoreError:
    """Returns the error for keys that could not be had, and counts it.

    Args:
        asked: the places that were looked at.
        problem: what came of it.
        settings: of the store.
    """
    return _counted(
        "credentials",
        f"no keys for {settings.where}: {problem}; asked: {asked}",
        "give this process a role or AWS_ACCESS_KEY_ID; off AWS set AWS_EC2_METADATA_DISABLED=true; "
        "for a public store add `?unsigned=true`",
    )


def unreachable(problem: str, settings: S3Settings) -> StoreError:
    """Returns the error for a server that gives no answer, and counts it."""
    low, hint = problem.lower(), None
    if "wrong_version" in low or "invalidmessage" in low or "invalidcontenttype" in low:
        hint = "the server does not speak https there: is the address http://?"
    elif "certificate" in low or "ssl" in low:
        hint = "name the authority of the server's certificate in AWS_CA_BUNDLE"
    elif settings.proxy:
        hint = f"requests go through the proxy {settings.proxy.rpartition('@')[2]}: see HTTPS_PROXY and NO_PROXY"
    elif "dns" in low or "resol" in low or "name or service" in low:
        hint = "the host is not known: check the store's address, AWS_ENDPOINT_URL_S3 and the region"
    return _counted("unusable", f"the store does not answer: {settings.where}: {problem[:300]}", hint)


def _counted(kind: str, message: str, hint: str | None) -> StoreError:
    COUNTS[kind] += 1
    return StoreError(message, hint=hint, kind=kind)
