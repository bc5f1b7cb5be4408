"""Names of all objects below a store's prefix.

v1/format.json                                       format and features, written once
v1/artifacts/<id>/packs/<sha256>                     immutable, one zstd frame
v1/artifacts/<id>/statement.dsse.json                immutable, written last: makes the artifact exist
v1/index/<name>/<channel>/<0000000042>.dsse.json     immutable; version = name = content
v1/index/<name>/<channel>/hint                       an unsigned number, the only object ever overwritten
v1/pins/<id>/<uuid>                                  announcement of a publisher
"""

from __future__ import annotations

import re

from cachepipe.errors import UsageError

FORMAT_KEY = "v1/format.json"
FORMAT_BYTES = b'{"features":[],"format":1}\n'

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?", re.ASCII)


def check_name(name: str, what: str) -> str:
    """Returns `name` if it can stand in keys and paths: 1–64 of `a-z0-9._-`, first and last alphanumeric.

    Raises:
        UsageError: it cannot.
    """
    if _NAME.fullmatch(name) is None or ".." in name:
        raise UsageError(f"{what} is not 1-64 characters of a-z 0-9 . _ -: {name[:80]!r}")
    return name


def pack_key(artifact: str, digest: str) -> str:
    return f"v1/artifacts/{artifact}/packs/{digest}"


def statement_key(artifact: str) -> str:
    return f"v1/artifacts/{artifact}/statement.dsse.json"


def index_prefix(name: str, channel: str) -> str:
    return f"v1/index/{name}/{channel}/"


def index_key(name: str, channel: str, version: int) -> str:
    return f"{index_prefix(name, channel)}{version:010d}.dsse.json"


def hint_key(name: str, channel: str) -> str:
    return f"{index_prefix(name, channel)}hint"


def pin_key(artifact: str, nonce: str) -> str:
    return f"v1/pins/{artifact}/{nonce}"
