"""Every key that we make is recognised as what it is, and no other key is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain.layout import (
    FORMAT_KEY,
    Place,
    hint_key,
    index_key,
    pack_key,
    pin_key,
    place_of,
    statement_key,
    tomb_key,
)
from cachepipe.domain.ulid import ulid
from tests.support.artifacts import NOW

artifacts = st.binary(min_size=10, max_size=10).map(lambda randomness: ulid(NOW, randomness))
names = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,8}[a-z0-9])?", fullmatch=True)
nonces = st.binary(min_size=16, max_size=16).map(bytes.hex)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(artifacts, names, names, st.integers(1, 10**10 - 1), nonces, digests)
def test_every_key_of_ours_is_recognised(
    artifact: str, name: str, channel: str, version: int, nonce: str, digest: str
) -> None:
    assert place_of(FORMAT_KEY) == Place("format")
    assert place_of(pack_key(artifact, digest)) == Place("pack", artifact)
    assert place_of(statement_key(artifact)) == Place("statement", artifact)
    assert place_of(index_key(name, channel, version)) == Place("index", "", name, channel, version)
    assert place_of(hint_key(name, channel)) == Place("hint", "", name, channel)
    assert place_of(pin_key(artifact, nonce)) == Place("pin", artifact)
    assert place_of(tomb_key(artifact, nonce)) == Place("tomb", artifact)


ARTIFACT = ulid(NOW, bytes(10))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "v1/format.json.bak",
        "v2/format.json",
        f"v1/artifacts/{ARTIFACT}/notes.txt",
        f"v1/artifacts/{ARTIFACT}/packs/{'A' * 64}",
        f"v1/artifacts/{ARTIFACT}/packs/{'a' * 63}",
        f"v1/artifacts/{ARTIFACT.lower()}/statement.dsse.json",
        f"v1/artifacts/{ARTIFACT}/statement.dsse.json\n",
        "v1/index/demo/stable/0000000000.dsse.json",
        "v1/index/demo/stable/1.dsse.json",
        "v1/index/demo/stable/0000000001.dsse.json~",
        "v1/index/demo/hint",
        "v1/index/Demo/stable/hint",
        f"v1/pins/{ARTIFACT}",
        f"v1/tombs/{ARTIFACT}/run/1",
    ],
)
def test_other_keys_are_none_of_ours(key: str) -> None:
    assert place_of(key) is None
