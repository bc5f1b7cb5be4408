"""Every byte and every truncation of a statement, an index, a file table, a marker and a trust policy (T-FLIP)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from cachepipe.adapters.packs import open_blob
from cachepipe.domain.artifact import check_path, read_table
from cachepipe.domain.index import PAYLOAD_TYPE, first_index
from cachepipe.domain.marker import marker_bytes, read_marker
from cachepipe.domain.policy import ChannelRule, policy_bytes, read_policy
from cachepipe.domain.statement import statement_bytes
from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE, check_keys, open_envelope, verify
from cachepipe.errors import CachepipeError, IntegrityError, TrustError
from cachepipe.workflows.fetch import row_of
from cachepipe.workflows.publish import PackedArtifact
from tests.support import authority
from tests.support.artifacts import NOW, make_artifact
from tests.support.authority import key, policy

BITS = (0x01, 0x20, 0x80)
"""A neighbour, the other case of a letter, a byte that is no ASCII."""


def damaged(data: bytes) -> Iterator[bytes]:
    for place in range(len(data)):
        yield data[:place]
        for bit in BITS:
            yield data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedArtifact:
    return make_artifact(tmp_path_factory.mktemp("artifact"))


def envelopes(packed: PackedArtifact) -> dict[str, bytes]:
    statement = authority.sealed(statement_bytes(packed.statement), STATEMENT_PAYLOAD_TYPE, "s")
    index = first_index("demo", "stable", (row_of(packed.statement, statement),), NOW, "0" * 32)
    return {STATEMENT_PAYLOAD_TYPE: statement, PAYLOAD_TYPE: authority.sealed_index(index)}


@pytest.mark.parametrize("kind", [STATEMENT_PAYLOAD_TYPE, PAYLOAD_TYPE])
def test_no_damage_of_a_statement_or_an_index_is_accepted(packed: PackedArtifact, kind: str) -> None:
    envelope, judge = envelopes(packed)[kind], check_keys(policy())
    assert verify(envelope, kind, "x", judge, NOW).status == "signed"
    accepted, cases = [], 0
    for number, bad in enumerate(damaged(envelope)):
        cases += 1
        try:
            verify(bad, kind, "x", judge, NOW)
            accepted.append(number)
        except (IntegrityError, TrustError):
            continue
    assert cases == 4 * len(envelope) > 6000
    assert accepted == []


def test_every_bit_of_a_signature_counts(packed: PackedArtifact) -> None:
    envelope, judge = envelopes(packed)[PAYLOAD_TYPE], check_keys(policy())
    tree = json.loads(envelope)
    sig = base64.b64decode(tree["signatures"][0]["sig"])
    for bit in range(len(sig) * 8):
        bad = bytearray(sig)
        bad[bit // 8] ^= 1 << bit % 8
        tree["signatures"][0]["sig"] = base64.b64encode(bad).decode()
        text = json.dumps(tree, sort_keys=True, separators=(",", ":")) + "\n"
        assert open_envelope(text.encode(), PAYLOAD_TYPE, "x")
        with pytest.raises(TrustError):
            verify(text.encode(), PAYLOAD_TYPE, "x", judge, NOW)


def test_no_damage_of_a_file_table_is_accepted(packed: PackedArtifact) -> None:
    blob = packed.statement.table
    data = (packed.blobs / blob.digest).read_bytes()
    assert open_blob(data, blob)
    for bad in damaged(data):
        with pytest.raises(IntegrityError):
            open_blob(bad, blob)


def test_a_damaged_table_under_a_new_digest_is_refused_or_as_safe_as_before(packed: PackedArtifact) -> None:
    statement = packed.statement
    raw = zstandard.ZstdDecompressor().decompress((packed.blobs / statement.table.digest).read_bytes())
    good = read_table(raw, statement.packs, 1)
    for bad in damaged(raw):
        try:
            table = read_table(bad, statement.packs, 1)
        except IntegrityError:
            continue
        assert len(table.files) == len(good.files)
        assert table.unpacked_bytes == good.unpacked_bytes
        for row in table.files:
            check_path(row.path)


def test_no_damage_of_a_marker_is_accepted() -> None:
    frozen = Path(__file__).resolve().parents[1] / "compat/format-1/marker.json"
    data = marker_bytes(read_marker(frozen.read_bytes()))
    assert read_marker(data)
    for bad in damaged(data):
        with pytest.raises(IntegrityError):
            read_marker(bad)


def test_a_damaged_policy_is_refused_or_says_something_else(tmp_path: Path) -> None:
    whole = policy(key("s", "statement"), key("i", "index"), channels={"stable": ChannelRule(2)}, revoked=("a" * 64,))
    data = policy_bytes(whole)
    for bad in damaged(data):
        try:
            found = check_keys(read_policy(bad))
        except TrustError:
            continue
        except CachepipeError as error:
            pytest.fail(f"not a TrustError: {error!r}")
        assert found != whole or json.loads(bad) == json.loads(data)
