"""Attacks on packs, tables and their restore (T-BOMB, T-DIR). Each must end in our own error that names what was wanted and found, with
nothing written outside the target. Ideas: zip and tar bombs, path games, frames that lie about their size."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from cachepipe.adapters.materialise import materialise
from cachepipe.adapters.packs import open_blob
from cachepipe.domain.artifact import Blob, FileRow, FileTable, Segment, read_table
from cachepipe.errors import IntegrityError

MIB = 1 << 20
ZERO = "0" * 64


def frame(data: bytes, **settings: Any) -> bytes:
    return zstandard.ZstdCompressor(**{"level": 3, "write_checksum": True, **settings}).compress(data)


def blob_of(data: bytes, raw_bytes: int) -> Blob:
    return Blob(hashlib.sha256(data).hexdigest(), len(data), raw_bytes)


def refused(data: bytes, blob: Blob) -> str:
    """Returns the message with which these bytes are refused, within 64 MiB of memory and 2 s."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IntegrityError) as caught:
        open_blob(data, blob)
    assert time.monotonic() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    return str(caught.value)


# --- frames --------------------------------------------------------------------------------------------------------------


def test_a_bomb_that_declares_its_size_is_refused_before_it_is_opened() -> None:
    bomb = frame(b"\0" * (256 * MIB))
    assert f"declared size: wanted 4096, found {256 * MIB}" in refused(bomb, blob_of(bomb, 4096))


def test_a_bomb_of_unknown_size_is_refused() -> None:
    bomb = frame(b"\0" * (64 * MIB), write_content_size=False)
    assert "declared size: wanted 4096, found none" in refused(bomb, blob_of(bomb, 4096))


def test_a_bomb_whose_header_lies_stops_at_the_promised_size() -> None:
    honest = frame(b"\0" * (16 * MIB))
    at = honest.index((16 * MIB).to_bytes(4, "little"))
    lying = honest[:at] + (4096).to_bytes(4, "little") + honest[at + 4 :]
    message = refused(lying, blob_of(lying, 4096))
    assert "raw size" in message or "cannot be decompressed" in message


def test_a_frame_that_wants_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(
        window_log=27, write_checksum=True, write_content_size=True, enable_ldm=True
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    stream = compressor.compressobj(size=20 * MIB)
    data = stream.compress(os.urandom(20 * MIB)) + stream.flush()
    assert zstandard.get_frame_parameters(data).window_size > 8 * MIB
    assert f"window: wanted <= {8 * MIB} bytes, found {20 * MIB}" in refused(data, blob_of(data, 20 * MIB))


def test_a_frame_shorter_than_promised_is_refused() -> None:
    data = frame(b"short")
    assert "declared size: wanted 6, found 5" in refused(data, blob_of(data, 6))


def test_a_frame_longer_than_promised_is_refused() -> None:
    data = frame(b"longer")
    assert "declared size: wanted 5, found 6" in refused(data, blob_of(data, 5))


def test_trailing_bytes_are_refused() -> None:
    data = frame(b"data") + b"x"
    assert f"length of its one frame: wanted {len(data)}, found {len(data) - 1}" in refused(data, blob_of(data, 4))


def test_a_second_frame_is_refused() -> None:
    data = frame(b"data") + frame(b"more")
    assert "length of its one frame" in refused(data, blob_of(data, 4))


def test_a_second_empty_frame_is_refused() -> None:
    data = frame(b"data") + frame(b"")
    assert "length of its one frame" in refused(data, blob_of(data, 4))


def test_a_skippable_frame_in_front_is_refused() -> None:
    data = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc" + frame(b"data")
    assert "not a zstd" in refused(data, blob_of(data, 4)) or "wanted 28b52ffd" in refused(data, blob_of(data, 4))


def test_a_skippable_frame_behind_is_refused() -> None:
    data = frame(b"data") + (0x184D2A50).to_bytes(4, "little") + (0).to_bytes(4, "little")
    assert "length of its one frame" in refused(data, blob_of(data, 4))


@pytest.mark.parametrize("kept", [0, 1, 4, 6, 12, -5, -1])
def test_a_truncated_frame_is_refused(kept: int) -> None:
    data = frame(b"some data that is cut")[:kept]
    assert refused(data, blob_of(data, 21))


def test_a_frame_without_checksum_is_refused() -> None:
    data = frame(b"data", write_checksum=False)
    assert "without a checksum" in refused(data, blob_of(data, 4))


def test_a_frame_with_a_dictionary_is_refused() -> None:
    dictionary = zstandard.train_dictionary(2048, [b"sample %d of a dictionary " % n * 20 for n in range(400)])
    data = frame(b"sample of a dictionary", dict_data=dictionary)
    assert zstandard.get_frame_parameters(data).dict_id != 0
    assert "dictionary" in refused(data, blob_of(data, 22))


def test_a_wrong_checksum_is_refused() -> None:
    data = frame(b"data" * 100)
    data = data[:-1] + bytes([data[-1] ^ 1])
    assert "cannot be decompressed" in refused(data, blob_of(data, 400))


def test_garbage_is_refused() -> None:
    assert "not a zstd frame" in refused(b"<html>", blob_of(b"<html>", 6))


def test_another_digest_is_refused_before_anything_is_parsed() -> None:
    data = frame(b"data")
    message = refused(data, replace(blob_of(data, 4), digest=ZERO))
    assert f"digest: wanted {ZERO}, found {hashlib.sha256(data).hexdigest()}" in message


def test_another_compressed_size_is_refused_first() -> None:
    data = frame(b"data")
    assert f"compressed size: wanted 1, found {len(data)}" in refused(data, replace(blob_of(data, 4), size_bytes=1))


def test_every_single_bit_flip_of_a_frame_is_refused() -> None:
    data = frame(bytes(range(64)))
    promised = blob_of(data, 64)
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << (position % 8)
        with pytest.raises(IntegrityError):
            open_blob(bytes(flipped), promised)
        try:  # and with the digest re-made: what passes must still be exactly the promised length
            assert len(open_blob(bytes(flipped), blob_of(bytes(flipped), 64))) == 64
        except IntegrityError:
            pass


def test_a_buffer_smaller_than_promised_is_refused() -> None:
    data = frame(b"data")
    with pytest.raises(IntegrityError, match="larger than its buffer: wanted <= 2 bytes, found 4"):
        open_blob(data, blob_of(data, 4), bytearray(2))


# --- tables --------------------------------------------------------------------------------------------------------------

DATA = b"0123456789"
PACK = blob_of(frame(DATA), len(DATA))
Rows = list[list[Any]]


def row(path: str = "a", size: int = 10, segments: Any = None, mode: int = 0o644, entries: Any = (0,)) -> list[Any]:
    return [path, mode, size, ZERO, [[0, 0, 10]] if segments is None else segments, list(entries), False]


def table_text(rows: Rows, root: str = "/r") -> bytes:
    return json.dumps({"files": rows, "format": 1, "root": root}).encode()


TABLES: dict[str, tuple[Rows, str]] = {
    "case_j2_dot_dot": ([row("../a")], "unsafe path"),
    "case_j2_dot_dot_inside": ([row("a/../../b")], "unsafe path"),
    "absolute": ([row("/etc/passwd")], "unsafe path"),
    "empty_part": ([row("a//b")], "unsafe path"),
    "dot": ([row("./a")], "unsafe path"),
    "empty_name": ([row("")], "unsafe path"),
    "backslash": ([row("a\\b")], "unsafe path"),
    "zero_byte": ([row("a\0b")], "unsafe path"),
    "newline": ([row("a\nb")], "unsafe path"),
    "unicode_slash": ([row("a\u2215b")], "unsafe path"),
    "drive": ([row("C:a")], "unsafe path"),
    "too_long": ([row("a" * 600)], "path too long: wanted <= 512 bytes, found 600"),
    "too_deep": ([row("/".join("a" * 17))], "path too deep: wanted <= 16 parts, found 17"),
    "duplicate": ([row("a", 5, [[0, 0, 5]]), row("a", 5, [[0, 5, 5]])], "given twice"),
    "prefix": ([row("a", 5, [[0, 0, 5]]), row("a/b", 5, [[0, 5, 5]])], "a is a file and a folder"),
    "overlap": ([row("a", 6, [[0, 0, 6]]), row("b", 6, [[0, 4, 6]])], "gap or overlap: wanted 6, found 4"),
    "gap": ([row("a", 4, [[0, 0, 4]]), row("b", 4, [[0, 6, 4]])], "gap or overlap: wanted 4, found 6"),
    "tail_not_used": ([row("a", 4, [[0, 0, 4]])], "raw size: wanted 10, found 4"),
    "beyond_the_pack": ([row("a", 11, [[0, 0, 11]])], "raw size: wanted 10, found 11"),
    "sizes_do_not_add_up": ([row("a", 9)], "do not add up: wanted 9, found 10"),
    "negative_offset": ([row("a", 10, [[0, -1, 10]])], "not within a pack"),
    "unknown_pack": ([row("a", 10, [[1, 0, 10]])], "not within a pack"),
    "empty_segment": ([row("a", 10, [[0, 0, 0], [0, 0, 10]])], "not within a pack"),
    "setuid": ([row(mode=0o4755)], "mode of a: wanted 0644 or 0755, found 2541"),
    "device_mode": ([row(mode=0o60644)], "mode of a"),
    "unknown_entry": ([row(entries=[7])], "are not in the statement"),
    "float_size": ([[*row()[:2], 10.0, *row()[3:]]], "size of a"),
    "boolean_size": ([[*row()[:2], True, *row()[3:]]], "size of a"),
    "huge_size": ([row("a", 1 << 50, [[0, 0, 10]])], "size of a: wanted 0..1073741824"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_hostile_table_is_refused(name: str) -> None:
    rows, message = TABLES[name]
    with pytest.raises(IntegrityError) as caught:
        read_table(table_text(rows), (PACK,), 1)
    assert message in str(caught.value)


def test_a_table_of_a_million_files_is_refused() -> None:
    rows = ",".join(['["a",420,0,"",[],[],false]'] * 200_000)
    with pytest.raises(IntegrityError, match=r"too many files: wanted <= 20000, found 200000"):
        read_table(f'{{"files":[{rows}],"format":1,"root":"/r"}}'.encode(), (), 1)


def test_names_that_differ_in_case_alone_are_two_files(tmp_path: Path) -> None:
    table = read_table(table_text([row("A", 5, [[0, 0, 5]]), row("a", 5, [[0, 5, 5]])]), (PACK,), 1)
    materialise_into(tmp_path / "out", table)
    assert (tmp_path / "out/A").read_bytes() + (tmp_path / "out/a").read_bytes() == DATA


# --- restore -------------------------------------------------------------------------------------------------------------


def materialise_into(target: Path, table: FileTable, fetch: Callable[[str], bytes] | None = None) -> None:
    target.mkdir(exist_ok=True)
    materialise(fetch or (lambda _: frame(DATA)), (PACK,), table, target, "/r", deadline=time.monotonic() + 20)


def one_file(path: str = "d/a", mode: int = 0o644) -> FileTable:
    return FileTable("/r", (FileRow(path, mode, 10, ZERO, (Segment(0, 0, 10),), (0,), False),))


def test_a_symlink_planted_as_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "outside").write_bytes(b"mine")
    (tmp_path / "out/a").symlink_to(tmp_path / "outside")
    with pytest.raises(IntegrityError, match="something else stands there"):
        materialise_into(tmp_path / "out", one_file("a"))
    assert (tmp_path / "outside").read_bytes() == b"mine"


def test_a_symlink_planted_as_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/d").symlink_to(tmp_path / "outside")
    with pytest.raises(IntegrityError, match="something else stands there"):
        materialise_into(tmp_path / "out", one_file("d/a"))
    assert not os.listdir(tmp_path / "outside")


def test_a_target_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "outside")
    with pytest.raises(IntegrityError, match="something else stands there"):
        materialise_into(tmp_path / "out", one_file())
    assert not os.listdir(tmp_path / "outside")


def test_a_fifo_planted_as_a_file_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out/a")
    with pytest.raises(IntegrityError, match="something else stands there"):
        materialise_into(tmp_path / "out", one_file("a"))


def test_a_file_that_is_already_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a").write_bytes(b"mine")
    with pytest.raises(IntegrityError, match="something else stands there"):
        materialise_into(tmp_path / "out", one_file("a"))
    assert (tmp_path / "out/a").read_bytes() == b"mine"


def test_a_file_that_is_cut_across_packs_does_not_follow_a_link_that_replaced_it(tmp_path: Path) -> None:
    halves = (blob_of(frame(DATA[:5]), 5), blob_of(frame(DATA[5:]), 5))
    rows = (FileRow("a", 0o644, 10, ZERO, (Segment(0, 0, 5), Segment(1, 0, 5)), (0,), False),)
    (tmp_path / "outside").write_bytes(b"mine")
    (tmp_path / "out").mkdir()

    def fetch(digest: str) -> bytes:
        (tmp_path / "out/a").unlink(missing_ok=True)
        (tmp_path / "out/a").symlink_to(tmp_path / "outside")
        return frame(DATA[:5]) if digest == halves[0].digest else frame(DATA[5:])

    with pytest.raises(IntegrityError):
        materialise(
            fetch,
            halves,
            FileTable("/r", rows),
            tmp_path / "out",
            "/r",
            fetchers=1,
            deadline=time.monotonic() + 20,
        )
    assert (tmp_path / "outside").read_bytes() == b"mine"


def test_a_missing_pack_is_refused_by_its_digest(tmp_path: Path) -> None:
    def fetch(digest: str) -> bytes:
        raise IntegrityError(f"pack {digest[:12]}", "missing in the store")

    with pytest.raises(IntegrityError, match=f"pack {PACK.digest[:12]}"):
        materialise_into(tmp_path / "out", one_file(), fetch)


def test_a_pack_that_was_swapped_for_another_is_refused(tmp_path: Path) -> None:
    other = frame(b"9876543210")
    with pytest.raises(IntegrityError, match=r"(compressed size|digest): wanted .*, found "):
        materialise_into(tmp_path / "out", one_file(), lambda _: other)
    assert not list((tmp_path / "out").rglob("a"))


def test_a_table_that_was_swapped_for_another_is_refused() -> None:
    wanted, other = frame(table_text([row("a")])), frame(table_text([row("b")]))
    assert "digest" in refused(other, replace(blob_of(wanted, len(table_text([row("a")]))), size_bytes=len(other)))


def test_a_group_file_cut_across_packs_is_refused(tmp_path: Path) -> None:
    rows = (FileRow("g", 0o644, 10, ZERO, (Segment(0, 0, 5), Segment(0, 5, 5)), (0,), True),)
    with pytest.raises(IntegrityError, match="group file: wanted one segment"):
        materialise_into(tmp_path / "out", FileTable("/r", rows))


def test_a_group_file_that_grows_by_its_tokens_is_bounded(tmp_path: Path) -> None:
    rows = (FileRow("g", 0o644, 2 * MIB, ZERO, (Segment(0, 0, 2 * MIB),), (0,), True),)
    with pytest.raises(IntegrityError, match="group file: wanted one segment, <= 1048576 bytes, found 1, 2097152"):
        materialise_into(tmp_path / "out", FileTable("/r", rows))


def test_no_written_file_is_more_than_a_regular_file_of_ours(tmp_path: Path) -> None:
    materialise_into(tmp_path / "out", one_file("d/a", 0o755))
    facts = (tmp_path / "out/d/a").lstat()
    assert (facts.st_mode & 0o7777, facts.st_uid, facts.st_nlink) == (0o755, os.geteuid(), 1)
