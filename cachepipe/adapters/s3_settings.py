"""Where an S3 store is and how it is asked: one reading of address and environment for both clients.

    s3://BUCKET[/PREFIX][?endpoint=URL&region=R&profile=P&path_style=BOOL&unsigned=BOOL&checksums=BOOL]

What the address says wins over the environment, and the environment over a profile. Variables are those of AWS:
AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_IGNORE_CONFIGURED_ENDPOINT_URLS, AWS_REGION, AWS_DEFAULT_REGION, AWS_PROFILE,
AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE, AWS_CA_BUNDLE, AWS_EC2_METADATA_DISABLED, HTTP(S)_PROXY, NO_PROXY; and ours
for what AWS has none for: CACHEPIPE_S3_PATH_STYLE, CACHEPIPE_S3_UNSIGNED, CACHEPIPE_S3_CHECKSUMS.

Why not the clients' own reading: obstore 0.12 knows neither profiles nor AWS_CA_BUNDLE and reads variables that boto3
does not (AWS_SKIP_SIGNATURE), boto3 1.44 reads no AWS_REGION, and they differ about NO_PROXY. Profiles, SSO, FIPS and
dual-stack endpoints, and keys from a container's address without a token file, are known to boto3 alone, so those are
read with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from cachepipe.adapters.store import check_key
from cachepipe.errors import StoreError

CREDENTIALS_LIMIT_S = 5.0
"""For keys, in all places that are asked: the defaults of a cluster otherwise add up to 20 s, and a metadata service out of
reach must not hold a start."""
CONNECT_S, READ_S, TRIES = 2, 10, 5
"""For every request: connecting, silence while reading, and how often a client tries."""

_S3_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", re.ASCII | re.IGNORECASE)
_PARAMETERS = ("endpoint", "region", "profile", "path_style", "unsigned", "checksums")
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_BOTO3_ALONE = ("AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT")
_STATIC_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}


@dataclass(frozen=True)
class S3Settings:
    """What both clients are told.

    Why every dataclass on this path has a docstring: without one the decorator makes it from the signature, 1 ms each.
    """

    s3_bucket: str
    prefix: str
    """Of every key: empty, or ends with a slash."""
    endpoint: str
    """Without a trailing slash; empty: AWS's own for the region."""
    region: str
    """Empty: not said; boto3 looks into the profile, then it is us-east-1."""
    profile: str
    is_path_style: bool | None
    """None: boto3 decides, with the profile's endpoint."""
    is_unsigned: bool
    has_checksums: bool
    """False for servers that refuse or ignore SHA-256 checksums: what is written is read back instead."""
    ca_bundle: str
    """File of certificates to trust for https; empty: the system's."""
    proxy: str
    """For this endpoint, after NO_PROXY; empty: none."""
    has_foreign_proxy: bool
    """A proxy is set that is not for this endpoint; a client that reads the environment itself must be told."""
    needs_boto3: bool
    """Something in the address, the environment or a file is known to boto3 alone."""
    has_static_keys: bool
    """The keys stand in the environment: there is nothing to look up."""
    has_metadata_service: bool
    """The machine's metadata service may be asked for keys."""

    @property
    def url(self) -> str:
        """The address for messages."""
        return f"s3://{self.s3_bucket}/{self.prefix}".rstrip("/")

    @property
    def where(self) -> str:
        """The address and the server behind it."""
        return f"{self.url} at {self.endpoint}" if self.endpoint else self.url


def read_settings(url: str, environment: Mapping[str, str]) -> S3Settings:
    """Returns the settings that an `s3://` address and an environment give together.

    Args:
        url: see the module's docstring.
        environment: variables of this process.

    Raises:
        StoreError: not such an address, an unknown or wrong parameter, or keys in the address.
    """
    s3_bucket, prefix, given = _parse(url)
    endpoint = _endpoint(given, environment)
    named = given.get("profile") or environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or ""
    region = given.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or ""
    # AWS_TOKEN is no variable of AWS's; obstore would send it as a session token
    needs_boto3 = bool(named or environment.get("AWS_TOKEN")) or _has_profile_files(environment)
    needs_boto3 = needs_boto3 or any(_is_on(environment.get(name, ""), name) for name in _BOTO3_ALONE)
    is_unsigned = bool(_flag(given, environment, "unsigned", False))
    has_static_keys = all(environment.get(name) for name in _STATIC_KEYS)
    needs_boto3 = needs_boto3 or (not (is_unsigned or has_static_keys) and _has_keys_for_boto3(environment))
    is_path_style = _flag(given, environment, "path_style", None)
    if is_path_style is None and not (needs_boto3 and not endpoint):
        is_path_style = bool(endpoint) or "." in s3_bucket  # a dot breaks the certificate of the virtual host
    host = _host(endpoint, s3_bucket, region, bool(is_path_style))
    proxy = proxy_for(*host, environment)
    has_foreign_proxy = not proxy and any(_either(environment, name) for name in _PROXY_VARIABLES)
    return S3Settings(
        s3_bucket=s3_bucket,
        prefix=prefix,
        endpoint=endpoint,
        region=region,
        profile=named,
        is_path_style=is_path_style,
        is_unsigned=is_unsigned,
        has_checksums=_flag(given, environment, "checksums", True) is not False,
        ca_bundle=environment.get("AWS_CA_BUNDLE", ""),
        proxy=proxy,
        has_foreign_proxy=has_foreign_proxy,
        needs_boto3=needs_boto3,
        has_static_keys=has_static_keys,
        has_metadata_service=not _is_on(environment.get("AWS_EC2_METADATA_DISABLED", ""), "AWS_EC2_METADATA_DISABLED"),
    )


def _parse(url: str) -> tuple[str, str, dict[str, str]]:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise StoreError(
            "keys in the address of a store would be printed in logs", hint="set AWS_ACCESS_KEY_ID or AWS_PROFILE"
        )
    if parts.scheme != "s3" or _S3_BUCKET.fullmatch(parts.netloc) is None or parts.fragment:
        raise StoreError(f"not the address of an S3 store: {url[:200]!r}", hint="use s3://bucket/prefix")
    prefix = unquote(parts.path).strip("/")
    if prefix:
        check_key(prefix)
    given: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _PARAMETERS or name in given or not value:
            problem = "unknown" if name not in _PARAMETERS else "given twice" if name in given else "empty"
            raise StoreError(
                f"parameter `{name[:40]}` of the store's address is {problem}", hint=f"known: {', '.join(_PARAMETERS)}"
            )
        given[name] = value
    return parts.netloc, f"{prefix}/" if prefix else "", given


def _endpoint(given: Mapping[str, str], environment: Mapping[str, str]) -> str:
    found, source = given.get("endpoint", ""), "endpoint"
    ignored = "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"
    if not found and not _is_on(environment.get(ignored, ""), ignored):
        for source in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            found = environment.get(source, "")
            if found:
                break
    if not found:
        return ""
    parts = urlsplit(found)
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address or parts.path.strip("/") or parts.query or "@" in parts.netloc:
        raise StoreError(f"`{source}` is not http://HOST[:PORT] or https://HOST[:PORT]")
    return f"{parts.scheme}://{parts.netloc}"


def _flag(given: Mapping[str, str], environment: Mapping[str, str], name: str, default: bool | None) -> bool | None:
    variable = f"CACHEPIPE_S3_{name.upper()}"
    if name in given:
        return _is_on(given[name], name)
    return _is_on(environment[variable], variable) if environment.get(variable) else default


def _is_on(text: str, name: str) -> bool:
    if text.lower() in _ON:
        return True
    if text and text.lower() not in _OFF:
        raise StoreError(f"`{name}` is neither true nor false: {text[:40]!r}")
    return False


def _has_profile_files(environment: Mapping[str, str]) -> bool:
    """Tells whether boto3 would find a file that may hold keys, a region or an endpoint."""
    home = environment.get("HOME") or os.path.expanduser("~")
    files = (environment.get(name) or default.replace("~", home, 1) for name, default in _FILES.items())
    return any(os.path.exists(path.replace("~", home, 1) if path.startswith("~/") else path) for path in files)


def _has_keys_for_boto3(environment: Mapping[str, str]) -> bool:
    """Tells whether a place of keys is named that obstore does not know: it would ask the metadata service instead."""

    def lacks(name: str, other: str) -> bool:
        return bool(environment.get(name)) and not environment.get(other)

    return (
        any(environment.get(name) for name in _STATIC_KEYS)  # half a pair
        or lacks("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
        or lacks("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN")
    )


def _host(endpoint: str, s3_bucket: str, region: str, is_path_style: bool) -> tuple[str, str]:
    """Returns scheme and host to which requests go."""
    if endpoint:
        parts = urlsplit(endpoint)
        scheme, host = parts.scheme, parts.hostname or ""
    else:
        suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        scheme, host = "https", f"s3.{region or 'us-east-1'}.{suffix}"
    return scheme, host if is_path_style else f"{s3_bucket}.{host}"


def full_endpoint(settings: S3Settings) -> str:
    """Returns the endpoint for a client that knows no other and adds no S3 bucket to the host's name itself."""
    endpoint = settings.endpoint or "://".join(_host("", settings.s3_bucket, settings.region, True))
    scheme, _, rest = endpoint.partition("://")
    return endpoint if settings.is_path_style else f"{scheme}://{settings.s3_bucket}.{rest}"


def proxy_for(scheme: str, host: str, environment: Mapping[str, str]) -> str:
    """Returns the proxy for requests to a host, or an empty string.

    `NO_PROXY` lists host names (with all names below them), addresses, networks (`10.0.0.0/8`), or `*`; a port is ignored.
    Small letters win over capitals, as everywhere.
    """
    proxy = _either(environment, f"{scheme}_proxy")
    if not proxy:
        return ""
    for entry in _either(environment, "no_proxy").split(","):
        wanted = entry.strip().lower().lstrip(".")
        if wanted and (wanted == "*" or _is_excluded(host.lower(), wanted)):
            return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_excluded(host: str, wanted: str) -> bool:
    if "/" in wanted:
        import ipaddress  # costs milliseconds that nearly no start needs

        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(wanted, strict=False)
        except ValueError:
            return False
    name, colon, port = wanted.partition(":")
    wanted = name if colon and port.isdigit() else wanted
    return host == wanted or host.endswith(f".{wanted}")


def _either(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name) or environment.get(name.upper()) or ""
