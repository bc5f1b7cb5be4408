"""Names of all objects below a store's prefix.

v1/format.json                                       format and features, written once
v1/artifacts/<id>/packs/<sha256>                     immutable, one zstd frame
v1/artifacts/<id>/statement.dsse.json                immutable, written last: makes the artifact exist
v1/index/<name>/<channel>/<0000000042>.dsse.json     immutable; version = name = content
v1/index/<name>/<channel>/hint                       an unsigned number, the only object ever overwritten
v1/pins/<id>/<uuid>                                  announcement of a publisher: do not remove this artifact
v1/tombs/<id>/<run>                                  announcement of gc: this artifact is being removed
"""

from __future__ import annotations

import re
from typing import NamedTuple

FORMAT_KEY = "v1/format.json"
FORMAT_BYTES = b'{"features":[],"format":1}\n'

ARTIFACTS, INDEXES, PINS, TOMBS = (f"v1/{kind}/" for kind in ("artifacts", "index", "pins", "tombs"))
"""What all keys of a kind begin with."""


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


def tomb_prefix(artifact: str) -> str:
    return f"{TOMBS}{artifact}/"


def tomb_key(artifact: str, run: str) -> str:
    return f"{tomb_prefix(artifact)}{run}"


class Place(NamedTuple):
    """What a key is the name of."""

    kind: str
    """`format`, `pack`, `statement`, `index`, `hint`, `pin` or `tomb`."""
    artifact: str = ""
    name: str = ""
    channel: str = ""
    version: int = 0


_NAMED = r"(?P<name>[a-z0-9._-]{1,64})/(?P<channel>[a-z0-9._-]{1,64})"
_OWNED = "(?P<artifact>[0-7][0-9A-HJKMNP-TV-Z]{25})"
_PLACES = tuple(
    (kind, re.compile(pattern, re.ASCII))
    for kind, pattern in (
        ("format", re.escape(FORMAT_KEY)),
        ("pack", f"{ARTIFACTS}{_OWNED}/packs/[0-9a-f]{{64}}"),
        ("statement", rf"{ARTIFACTS}{_OWNED}/statement\.dsse\.json"),
        ("index", rf"{INDEXES}{_NAMED}/(?P<version>[0-9]{{10}})\.dsse\.json"),
        ("hint", f"{INDEXES}{_NAMED}/hint"),
        ("pin", f"{PINS}{_OWNED}/[0-9a-f]{{1,64}}"),
        ("tomb", f"{TOMBS}{_OWNED}/[0-9a-f]{{1,64}}"),
    )
)


def place_of(key: str) -> Place | None:
    """Returns what a key names; None: nothing of ours, which no command reads or removes."""
    for kind, pattern in _PLACES:
        found = pattern.fullmatch(key)
        if found is None:
            continue
        parts = found.groupdict()
        version = int(parts.get("version") or 0)
        if kind == "index" and version == 0:
            return None
        return Place(kind, parts.get("artifact", ""), parts.get("name", ""), parts.get("channel", ""), version)
    return None
