"""Reading what is published: any hint, any damage, any reference."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.domain.index import PAYLOAD_TYPE, IndexRow, first_index, index_bytes, select
from cachepipe.domain.layout import FORMAT_KEY, hint_key, index_key, pack_key, statement_key
from cachepipe.domain.limits import LIMITS
from cachepipe.errors import (
    FingerprintMismatchError,
    IntegrityError,
    MissError,
    StoreError,
    TrustError,
    UsageError,
)
from cachepipe.workflows.channels import renew
from cachepipe.workflows.fetch import (
    read_artifact,
    read_channel,
    read_file_table,
    read_index_version,
    resolve_ref,
    resolve_rows,
    row_of,
)
from cachepipe.workflows.publish import PackedArtifact, publish
from tests.support.artifacts import CPU_PARTS, CUDA_PARTS, NOW, fingerprint_of, make_artifact


class CountingStore(LocalStore):
    """A store that says what was asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []

    def get(self, key: str, limit_bytes: int) -> bytes | None:
        self.reads.append(key)
        return super().get(key, limit_bytes)

    def list(self, prefix: str) -> Iterator[str]:
        self.reads.append(f"LIST {prefix}")
        return super().list(prefix)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "store")


@pytest.fixture
def packed(tmp_path: Path) -> PackedArtifact:
    return make_artifact(tmp_path)


def put_index(store: LocalStore, number: int, **changes: object) -> None:
    index = dataclasses.replace(first_index("demo", "stable", (), NOW, f"{number:032x}"), version=number)
    data = store.trust.seal(index_bytes(dataclasses.replace(index, **changes)), PAYLOAD_TYPE)  # type: ignore[arg-type]
    store.put_if_absent(index_key("demo", "stable", number), data)


def put_versions(store: LocalStore, last: int) -> None:
    for version in range(1, last + 1):
        put_index(store, version)


def set_hint(store: LocalStore, data: bytes) -> None:
    store.put_hint(hint_key("demo", "stable"), data)


def overwrite(store: LocalStore, key: str, data: bytes) -> None:
    store.delete(key)
    assert store.put_if_absent(key, data)


# --- channels and hints -----------------------------------------------------------------------------------------------


def test_nothing_published_is_a_miss_that_names_the_store(store: CountingStore) -> None:
    with pytest.raises(MissError, match="demo@stable: there is no store at file://"):
        read_channel(store, "demo", "stable", NOW)


def test_a_right_hint_costs_hint_index_and_one_probe(store: CountingStore) -> None:
    put_versions(store, 5)
    set_hint(store, b"5\n")
    store.reads.clear()
    found = read_channel(store, "demo", "stable", NOW)
    assert (found.version, found.hint, found.status) == (5, 5, "development key")
    assert store.reads == [
        hint_key("demo", "stable"),
        index_key("demo", "stable", 5),
        index_key("demo", "stable", 6),
    ]


LYING_HINTS: list[bytes | None] = [b"", b"1", b"3\n", b"36", b"37", b"38", b"100", b"9999999999", b"99999999999", b"-5"]
LYING_HINTS += [b"x", b"0", b"3.5", b"\xff", b"9" * (LIMITS.small_file_bytes + 1), "٣".encode(), None]


@pytest.mark.parametrize("hint", LYING_HINTS)
def test_a_hint_that_lies_costs_time_and_never_gives_an_older_version(store: CountingStore, hint: bytes | None) -> None:
    put_versions(store, 37)
    if hint is not None:
        set_hint(store, hint)
    store.reads.clear()
    assert read_channel(store, "demo", "stable", NOW).version == 37
    assert len(store.reads) <= LIMITS.probes + 2
    assert not any(read.startswith("LIST") for read in store.reads)


def test_an_index_without_an_end_is_refused_within_the_probes(store: CountingStore) -> None:
    class Endless(CountingStore):
        def get(self, key: str, limit_bytes: int) -> bytes | None:
            version = key.rpartition("/")[2].partition(".")[0]
            if key.startswith("v1/index/") and version.isdigit():
                put_index(self, int(version))
            return super().get(key, limit_bytes)

    endless = Endless(Path(store.root))
    with pytest.raises((IntegrityError, StoreError)):
        read_channel(endless, "demo", "stable", NOW)
    assert len(endless.reads) <= LIMITS.probes + 3


def test_an_expired_index_is_refused_after_the_tolerance(store: CountingStore) -> None:
    put_index(store, 1)
    read_channel(store, "demo", "stable", NOW + timedelta(days=14, seconds=300))
    with pytest.raises(TrustError, match="expired"):
        read_channel(store, "demo", "stable", NOW + timedelta(days=14, seconds=301))


def test_a_miss_tells_an_absent_channel_from_an_absent_store(store: CountingStore, packed: PackedArtifact) -> None:
    with pytest.raises(MissError, match="there is no store at") as absent:
        read_channel(store, "demo", "stable", NOW)
    assert "mounted" in absent.value.hint
    publish(store, "demo", "candidate", packed, NOW)
    with pytest.raises(MissError, match="nothing is published: demo@stable in") as unpromoted:
        read_channel(store, "demo", "stable", NOW)
    assert "promote" in unpromoted.value.hint


def test_an_expired_index_can_be_renewed_and_its_history_read(store: CountingStore, packed: PackedArtifact) -> None:
    publish(store, "demo", "stable", packed, NOW)
    late = NOW + timedelta(days=60)
    with pytest.raises(TrustError):
        read_index_version(store, "demo", "stable", 1, late)
    assert read_index_version(store, "demo", "stable", 1, None).version == 1
    renew(store, "demo", "stable", late)
    assert read_channel(store, "demo", "stable", late).version == 2


def test_a_version_that_does_not_exist_is_a_miss(store: CountingStore) -> None:
    put_index(store, 1)
    with pytest.raises(MissError):
        read_index_version(store, "demo", "stable", 2, NOW)


@pytest.mark.parametrize("changes", [{"version": 7}, {"name": "other"}, {"channel": "canary"}, {"format": 2}])
def test_an_index_of_another_name_channel_or_number_is_refused(
    store: CountingStore, changes: dict[str, object]
) -> None:
    put_index(store, 1, **changes)
    with pytest.raises(IntegrityError):
        read_channel(store, "demo", "stable", NOW)


def test_a_statement_in_the_place_of_an_index_is_refused(store: CountingStore, packed: PackedArtifact) -> None:
    row = publish(store, "demo", "stable", packed, NOW)
    envelope = store.get(statement_key(row.artifact), LIMITS.statement_bytes)
    assert envelope is not None
    overwrite(store, index_key("demo", "stable", 1), envelope)
    with pytest.raises(TrustError):
        read_channel(store, "demo", "stable", NOW)


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "a" * 65, ".x"])
def test_a_name_that_cannot_be_one_is_refused_before_any_request(store: CountingStore, name: str) -> None:
    with pytest.raises(UsageError):
        read_channel(store, name, "stable", NOW)
    with pytest.raises(UsageError):
        read_channel(store, "demo", name, NOW)
    assert store.reads == []


@pytest.mark.parametrize("data", [b'{"features":["x"],"format":1}\n', b'{"features":[],"format":2}\n', b"[]\n", b"1"])
def test_a_store_of_another_format_is_refused_by_name(store: CountingStore, data: bytes) -> None:
    store.put_if_absent(FORMAT_KEY, data)
    with pytest.raises(StoreError, match="format"):
        read_channel(store, "demo", "stable", NOW)


def test_a_format_that_is_no_text_is_an_integrity_error(store: CountingStore) -> None:
    store.put_if_absent(FORMAT_KEY, b"\xff")
    with pytest.raises(IntegrityError):
        read_channel(store, "demo", "stable", NOW)


# --- artifacts --------------------------------------------------------------------------------------------------------


def test_case_e8_the_row_of_a_reader_is_the_row_of_the_publisher(store: CountingStore, packed: PackedArtifact) -> None:
    published = publish(store, "demo", "stable", packed, NOW)
    (row,) = read_channel(store, "demo", "stable", NOW).index.rows
    artifact = read_artifact(store, row, "demo")
    assert published == row == row_of(artifact.statement, artifact.envelope)
    assert artifact.digest == row.statement
    assert artifact.statement == packed.statement


def test_case_c8_an_artifact_without_a_statement_is_invisible(store: CountingStore, packed: PackedArtifact) -> None:
    row = publish(store, "demo", "stable", packed, NOW)
    store.delete(statement_key(row.artifact))
    with pytest.raises(IntegrityError, match="missing"):
        read_artifact(store, row)
    with pytest.raises(MissError):
        resolve_ref(store, row.artifact)
    with pytest.raises(MissError):
        resolve_ref(store, row.statement)


def test_case_b1_a_cpu_without_the_flags_is_refused_before_any_artifact_is_read(
    store: CountingStore, packed: PackedArtifact
) -> None:
    publish(store, "demo", "stable", packed, NOW)
    store.reads.clear()
    index = read_channel(store, "demo", "stable", NOW).index
    older = fingerprint_of(CPU_PARTS, cpu_isa="avx2", cpu_flags="avx avx2 f16c fma")
    with pytest.raises(FingerprintMismatchError) as caught:
        select(index.rows, older, "demo@stable")
    assert any("missing avx512bw" in text for text in caught.value.differences)
    assert not any(read.startswith("v1/artifacts/") for read in store.reads)


def test_a_changed_statement_is_refused(store: CountingStore, packed: PackedArtifact) -> None:
    row = publish(store, "demo", "stable", packed, NOW)
    key = statement_key(row.artifact)
    envelope = store.get(key, LIMITS.statement_bytes)
    assert envelope is not None
    for bad in (envelope[:-1], envelope + b" ", envelope.replace(b"A", b"B", 1), b"", b"{}"):
        overwrite(store, key, bad)
        with pytest.raises((IntegrityError, TrustError)):
            read_artifact(store, row)


@pytest.mark.parametrize(
    "changes",
    [
        {"statement": "0" * 64},
        {"size_bytes": 1},
        {"packs_bytes": 1},
        {"device": "cuda"},
        {"created_at": "2020-01-01T00:00:00Z"},
        {"fingerprint": ()},
        {"artifact": "01KB9WZDG00000000000000000"},
        {"artifact": "../../etc"},
    ],
)
def test_a_row_that_says_something_else_than_its_statement_is_refused(
    store: CountingStore, packed: PackedArtifact, changes: dict[str, object]
) -> None:
    row = publish(store, "demo", "stable", packed, NOW)
    with pytest.raises(IntegrityError):
        read_artifact(store, dataclasses.replace(row, **changes))  # type: ignore[arg-type]


def test_the_statement_of_another_artifact_is_refused(store: CountingStore, tmp_path: Path) -> None:
    rows = [publish(store, "demo", "stable", make_artifact(tmp_path, number), NOW) for number in (1, 2)]
    other = store.get(statement_key(rows[1].artifact), LIMITS.statement_bytes)
    assert other is not None
    overwrite(store, statement_key(rows[0].artifact), other)
    with pytest.raises(IntegrityError):
        read_artifact(store, rows[0])
    with pytest.raises(IntegrityError, match="another artifact"):
        resolve_ref(store, rows[0].artifact)


def test_an_artifact_of_another_release_is_refused(store: CountingStore, packed: PackedArtifact) -> None:
    row = publish(store, "demo", "stable", packed, NOW)
    with pytest.raises(IntegrityError, match="another release"):
        read_artifact(store, row, "other")


def test_the_file_table_is_read_and_checked(store: CountingStore, packed: PackedArtifact) -> None:
    publish(store, "demo", "stable", packed, NOW)
    statement = packed.statement
    assert len(read_file_table(store, statement).files) == 3
    for changed in (
        dataclasses.replace(statement, files=4),
        dataclasses.replace(statement, root="/elsewhere"),
        dataclasses.replace(statement, unpacked_bytes=1),
    ):
        with pytest.raises(IntegrityError):
            read_file_table(store, changed)
    key = pack_key(statement.artifact, statement.table.digest)
    data = store.get(key, 1 << 20)
    assert data is not None
    overwrite(store, key, bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(IntegrityError):
        read_file_table(store, statement)
    store.delete(key)
    with pytest.raises(IntegrityError, match="missing"):
        read_file_table(store, statement)


# --- references --------------------------------------------------------------------------------------------------------


def two_targets(store: LocalStore, folder: Path) -> list[IndexRow]:
    artifacts = [make_artifact(folder, 1, CPU_PARTS), make_artifact(folder, 2, CUDA_PARTS)]
    return [publish(store, "demo", "stable", packed, NOW) for packed in artifacts]


def test_every_form_of_a_reference_names_the_same_artifact(store: CountingStore, packed: PackedArtifact) -> None:
    row = publish(store, "demo", "stable", packed, NOW)
    for ref in ("demo@stable", "demo@stable:1", row.artifact, row.statement, row.statement[:8]):
        assert resolve_ref(store, ref).digest == row.statement
        assert resolve_rows(store, ref) == (row,)


def test_a_channel_with_several_targets_names_them(store: CountingStore, tmp_path: Path) -> None:
    rows = two_targets(store, tmp_path)
    assert list(resolve_rows(store, "demo@stable")) == rows
    with pytest.raises(UsageError) as caught:
        resolve_ref(store, "demo@stable")
    assert all(row.artifact in str(caught.value) for row in rows)
    assert resolve_ref(store, "demo@stable:1").digest == rows[0].statement


@pytest.mark.parametrize("ref", ["demo", "@", "demo@", "0123456", "Z" * 8, "", "demo@stable:x", "../x@y", "0" * 65])
def test_another_text_is_no_reference(store: CountingStore, ref: str) -> None:
    with pytest.raises(UsageError):
        resolve_ref(store, ref)


@pytest.mark.parametrize("ref", ["demo@stable", "demo@stable:3", "01KB9WZDG00000000000000000", "0123abcd"])
def test_a_reference_to_nothing_is_a_miss(store: CountingStore, ref: str) -> None:
    with pytest.raises(MissError):
        resolve_ref(store, ref)


def test_reading_imports_nothing_heavy() -> None:
    heavy = "torch pydantic boto3 rich click asyncio concurrent.futures zstandard securesystemslib jinja2 pynvml"
    code = (
        "import sys, cachepipe.workflows.fetch, cachepipe.adapters.store, cachepipe.adapters.local_store\n"
        f"print(sorted(set({heavy.split()!r}) & set(sys.modules)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CACHEPIPE_ATTACH"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout == "[]\n"
