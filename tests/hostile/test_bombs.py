"""Bombs (T-BOMB): little data that asks for much memory, time or disk. Each is refused within 64 MiB and two seconds of work.

The limits are real ones of this process, so that a reader that only counts afterwards fails here. Bombs that need a key are
signed by the right one: what is refused then is our own builder's mistake.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.packs import open_blob
from cachepipe.adapters.policy_file import read_policy_file
from cachepipe.domain.artifact import Blob, read_table
from cachepipe.domain.index import read_index
from cachepipe.domain.limits import GIB, KIB, LIMITS, MIB
from cachepipe.domain.lock import read_lock
from cachepipe.domain.marker import read_marker
from cachepipe.domain.policy import read_policy
from cachepipe.domain.record import parse_json
from cachepipe.domain.statement import Statement, read_statement, statement_bytes
from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE, Signature, open_envelope, seal
from cachepipe.errors import CachepipeError
from tests.support.artifacts import make_artifact

ZERO = "0" * 64
HEAP = 64 * MIB


@contextmanager
def bounded() -> Iterator[None]:
    """Gives 64 MiB of address space more than there is now, and 2 s of processor time."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (now + HEAP, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - began < 2


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(CachepipeError) as caught, bounded():
        read()
    return str(caught.value)


# --- frames, made by hand: zstd's own writer takes seconds for them ------------------------------------------------------


def frame(blocks: bytes, content_bytes: int, window_log: int = 23) -> bytes:
    """Returns a zstd frame with a checksum (a wrong one) that declares a size and a window. Source: RFC 8878, section 3.1.1."""
    descriptor = 3 << 6 | 1 << 2  # eight bytes of content size, a checksum, no single segment
    header = bytes([descriptor, (window_log - 10) << 3]) + content_bytes.to_bytes(8, "little")
    return b"\x28\xb5\x2f\xfd" + header + blocks + bytes(4)


def zeros(total: int) -> bytes:
    """Returns blocks of 4 bytes that stand for 128 KiB each: 4 GiB in 131 kB, the most that a frame can do."""
    count = total // (128 * KIB)
    block = (128 * KIB) << 3 | 1 << 1
    return (
        block.to_bytes(3, "little") + b"\0"
        if count == 1
        else ((block.to_bytes(3, "little") + b"\0") * (count - 1) + (block | 1).to_bytes(3, "little") + b"\0")
    )


def empty_blocks(count: int) -> bytes:
    return bytes(3) * count + (1).to_bytes(3, "little")


def opened(data: bytes, raw_bytes: int) -> Callable[[], object]:
    return lambda: open_blob(data, Blob(hashlib.sha256(data).hexdigest(), len(data), raw_bytes))


def test_the_bombs_of_this_file_are_real(tmp_path: Path) -> None:
    import zstandard

    small = frame(zeros(2 * MIB), 2 * MIB)
    reader = zstandard.ZstdDecompressor().stream_reader(small[:-4])
    assert len(reader.read(2 * MIB)) == 2 * MIB
    with pytest.raises(OSError, match="Cannot allocate"), bounded():
        mmap.mmap(-1, HEAP + MIB)  # never from what an earlier test left free in the heap


FRAMES = {
    "four_gib_that_says_so": (
        frame(zeros(4 * GIB), 4 * GIB),
        8 * MIB,
        f"declared size: wanted {8 * MIB}, found {4 * GIB}",
    ),
    "four_gib_that_lies": (frame(zeros(4 * GIB), 8 * MIB), 8 * MIB, ""),
    "four_gib_behind_a_kilobyte": (frame(zeros(4 * GIB), KIB), KIB, ""),
    "a_header_of_16_eib": (frame(zeros(MIB), (1 << 64) - 3), MIB, "declared size"),
    "a_window_of_2_gib": (frame(zeros(MIB), MIB, window_log=31), MIB, "window: wanted"),
    "a_window_of_the_largest_exponent": (frame(zeros(MIB), MIB, window_log=41), MIB, ""),
    "millions_of_empty_blocks": (frame(empty_blocks(8 * MIB // 3), MIB), MIB, ""),
    "a_block_longer_than_the_frame": (
        frame((0x1FFFFF << 3).to_bytes(3, "little"), MIB),
        MIB,
        "length of its one frame",
    ),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_asks_for_more_than_was_promised_is_refused(name: str) -> None:
    data, raw_bytes, message = FRAMES[name]
    assert message in refused(opened(data, raw_bytes))


def test_a_bomb_inside_a_frame_stays_packed() -> None:
    import zstandard

    bomb = frame(zeros(4 * GIB), 4 * GIB)
    outer = zstandard.ZstdCompressor(write_checksum=True).compress(bomb)
    with bounded():
        assert bytes(open_blob(outer, Blob(hashlib.sha256(outer).hexdigest(), len(outer), len(bomb)))) == bomb
    assert "not strict JSON" in refused(lambda: read_table(bomb, (), 1))


# --- texts ---------------------------------------------------------------------------------------------------------------

PAGE = 7 * MIB
TEXTS = {
    "a_million_lists_in_each_other": b"[" * MIB,
    "a_million_objects_in_each_other": b'{"a":' * MIB,
    "a_number_of_a_million_digits": b"9" * MIB,
    "a_float_beyond_all": b"1e999",
    "a_float_of_a_million_digits": b"1." + b"1" * MIB + b"e999999999",
    "a_key_twice": b'{"a":1,"a":2}',
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_only_costs_is_no_strict_json(name: str) -> None:
    assert "not strict JSON" in refused(lambda: parse_json(TEXTS[name], "text", 8 * MIB))


def table_of(rows: Iterator[str]) -> bytes:
    return f'{{"files":[{",".join(rows)}],"format":1,"root":"/r"}}'.encode()


def row(path: str, size: int = 0, segments: str = "[]") -> str:
    return f'["{path}",420,{size},"{ZERO}",{segments},[0],false]'


TABLES = {
    "a_million_files": (lambda: table_of(row("a") for _ in range(10**6)), "too long: wanted <="),
    "a_name_table_of_many_names": (lambda: table_of(row(f"a{n}") for n in range(20_001)), "too many files"),
    "every_name_twice": (lambda: table_of(row(f"a{n // 2}") for n in range(20_000)), "given twice"),
    "a_name_of_megabytes": (lambda: table_of(iter([row("a" * PAGE)])), "path too long"),
    "a_part_that_no_file_system_takes": (lambda: table_of(iter([row("a" * 256)])), "unsafe path"),
    "a_path_of_a_thousand_parts": (lambda: table_of(iter([row("/".join("a" * 250))])), "path too deep"),
    "deep_names_of_all_files": (
        lambda: table_of(row("/".join([f"b{n}", *"a" * 14])) for n in range(20_001)), "too many files",
    ),
    "a_file_of_a_terabyte": (lambda: table_of(iter([row("a", 1 << 40)])), "size of a: wanted"),
    "a_sparse_file": (lambda: table_of(iter([row("a", GIB, "[[0,0,1]]")])), "do not add up"),
    "one_byte_used_a_million_times": (
        lambda: table_of(iter([row("a", 9**5, "[" + ",".join(["[0,0,1]"] * 9**5) + "]")])), "more than 1024",
    ),
    "files_of_a_gigabyte_each": (
        lambda: table_of(row(f"a{n}", GIB, "[[0,0,8388608]]") for n in range(9)), "do not add up",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_asks_for_too_much_is_refused(name: str) -> None:
    make, message = TABLES[name]
    data = make()
    assert message in refused(lambda: read_table(data, (Blob(ZERO, 10, 1),), 1))


@pytest.fixture(scope="module")
def statement(tmp_path_factory: pytest.TempPathFactory) -> Statement:
    return make_artifact(tmp_path_factory.mktemp("bombs")).statement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, table=replace(s.table, raw_bytes=4 * GIB)), "raw_bytes: wanted 0..8388608"),
        (lambda s: replace(s, table=replace(s.table, size_bytes=4 * GIB)), "size_bytes: wanted"),
        (lambda s: replace(s, packs=(replace(s.packs[0], raw_bytes=4 * GIB),)), "raw_bytes: wanted"),
        (lambda s: replace(s, packs=(replace(s.packs[0], size_bytes=4 * GIB),)), "size_bytes: wanted"),
        (lambda s: replace(s, packs=(replace(s.packs[0], size_bytes=-1),)), "size_bytes: wanted"),
        (lambda s: replace(s, unpacked_bytes=9 * GIB), "unpacked_bytes: wanted"),
        (lambda s: replace(s, files=10**6), "files: wanted"),
        (lambda s: replace(s, packs=s.packs * 10_000), "too long"),
    ],
)
def test_a_statement_that_promises_too_much_is_refused_before_anything_is_fetched(
    statement: Statement, change: Callable[[Statement], Statement], message: str
) -> None:
    data = statement_bytes(change(statement))
    assert message in refused(lambda: read_statement(data))


ENVELOPES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a_payload_of_megabytes": (lambda: seal(bytes(PAGE), STATEMENT_PAYLOAD_TYPE), "too long"),
    "thousands_of_signatures": (
        lambda: seal(b"x", STATEMENT_PAYLOAD_TYPE, [Signature(f"{n:06}", b"s") for n in range(20_000)]),
        "too many signatures",
    ),
    "one_signature_of_a_megabyte": (
        lambda: seal(b"x", STATEMENT_PAYLOAD_TYPE, [Signature("k", bytes(MIB))]), "too long",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVELOPES)
def test_an_envelope_that_only_costs_is_refused(name: str) -> None:
    make, message = ENVELOPES[name]
    data = make()
    assert message in refused(lambda: open_envelope(data, STATEMENT_PAYLOAD_TYPE, "statement"))


@pytest.mark.parametrize(
    "read",
    [
        read_lock,
        read_marker,
        read_policy,
        read_statement,
        lambda data: read_index(data, "demo", "stable", 1),
        lambda data: read_table(data, (), 1),
        lambda data: open_envelope(data, STATEMENT_PAYLOAD_TYPE, "x"),
    ],
    ids=["lock", "marker", "policy", "statement", "index", "table", "envelope"],
)
def test_no_reader_is_stopped_by_depth_or_numbers_alone(read: Callable[[bytes], object]) -> None:
    for text in TEXTS.values():
        assert refused(lambda text=text: read(text[: 200 * KIB]))  # type: ignore[misc]


# --- streams -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["endless", "sparse"])
@pytest.mark.parametrize("limit_bytes", [LIMITS.small_file_bytes, LIMITS.statement_bytes, LIMITS.pack_raw_bytes])
def test_an_object_without_end_is_read_no_further_than_its_limit(tmp_path: Path, kind: str, limit_bytes: int) -> None:
    (tmp_path / "v1").mkdir()
    if kind == "endless":
        (tmp_path / "v1/x").symlink_to("/dev/zero")
    else:
        (tmp_path / "v1/x").touch()
        os.truncate(tmp_path / "v1/x", 4 * GIB)
    wanted = "not a regular file" if kind == "endless" else f"wanted <= {limit_bytes} bytes"
    assert wanted in refused(lambda: LocalStore(tmp_path).get("v1/x", limit_bytes))


def test_a_policy_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trust.json").touch(0o644)
    os.truncate(tmp_path / "trust.json", 4 * GIB)
    assert "longer than 65536 bytes" in refused(lambda: read_policy_file(str(tmp_path / "trust.json")))
