"""Log files are read whole or refused by name, and never beyond what a log may have."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from pathlib import Path

import pytest

from cachepipe.adapters.log_files import find_logs, read_logs
from cachepipe.domain.kms_log import LogLimits
from cachepipe.errors import IntegrityError, UsageError

LIMITS = LogLimits(file_bytes=1000, raw_bytes=2000, files=3)


def texts(*paths: Path, limits: LogLimits = LIMITS) -> list[bytes]:
    return [data for _, data in read_logs(find_logs(paths, limits).logs, limits)]


def test_a_folder_gives_the_logs_below_it_and_nothing_else(tmp_path: Path) -> None:
    trail = tmp_path / "AWSLogs/1/CloudTrail/eu-west-1"
    digests = tmp_path / "AWSLogs/1/CloudTrail-Digest/eu-west-1"
    for folder in (trail, digests):
        folder.mkdir(parents=True)
        (folder / "b.json.gz").write_bytes(gzip.compress(f"packed in {folder.parts[-2]}".encode()))
    (trail / "a.json").write_bytes(b"plain")
    (trail / "notes.txt").write_bytes(b"no log")
    (trail / "c.JSON.GZ").write_bytes(gzip.compress(b"by another system"))
    (trail / "d.Json").write_bytes(b"by a person")
    found = texts(tmp_path, limits=LogLimits())
    assert found == [b"plain", b"packed in CloudTrail", b"by another system", b"by a person"]
    assert find_logs([tmp_path]).others == [trail / "notes.txt"], "told, for it may be a log by another name"
    assert texts(trail / "notes.txt", trail / "b.json.gz") == [b"no log", b"packed in CloudTrail"], "named by a person"


@pytest.mark.parametrize("target", ["elsewhere", ".", "nowhere"])
def test_a_link_to_a_folder_is_refused_and_never_left_out_in_silence(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.json").write_bytes(b"linked")
    trail = tmp_path / "trail/2026"
    trail.mkdir(parents=True)
    (trail / "a.json").write_bytes(b"plain")
    (trail / "day2").symlink_to(trail if target == "." else tmp_path / target)
    if target == "nowhere":
        assert find_logs([tmp_path / "trail"]).others == [trail / "day2"], (
            "of what is not there nobody knows what it was"
        )
        return
    with pytest.raises(UsageError, match=r"a link to a folder, which is not followed: .*/day2"):
        find_logs([tmp_path / "trail"])
    if target == "elsewhere":
        assert texts(trail / "day2") == [b"linked"], "named by a person"


def test_a_name_that_breaks_lines_breaks_none(tmp_path: Path) -> None:
    name = tmp_path / "a\r\nerror: b\u2028\x1b[2J.json"
    name.write_bytes(b"\x1f\x8b")
    with pytest.raises(IntegrityError) as caught:
        texts(tmp_path)
    assert str(caught.value).isprintable()


def test_what_cannot_be_read_is_a_mistake_of_usage(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "empty").mkdir()
    for path, told in (
        (tmp_path / "none", "no such file"),
        (tmp_path / "pipe.json", "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "empty", "no log file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / ("x" * 300), "cannot be read"),
    ):
        with pytest.raises(UsageError, match=told):
            texts(path)


@pytest.mark.parametrize("keep", [2, 10, 12, 40, -8, -1])
def test_a_log_that_was_cut_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(os.urandom(200))[:keep])
    with pytest.raises(IntegrityError, match=r"x\.json\.gz: not whole"):
        texts(tmp_path)


def test_of_a_log_whose_bytes_were_changed_nothing_else_is_ever_read(tmp_path: Path) -> None:
    text = os.urandom(50) + b"x" * 100
    whole, refused = gzip.compress(text), 0
    for bit in range(80, 8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "x.json.gz").write_bytes(changed)
        try:
            assert texts(tmp_path) == [text], "a bit that fills up the last byte"
        except IntegrityError as error:
            assert "x.json.gz" in str(error)
            refused += 1
    assert refused > 8 * len(whole) - 80 - 8


def test_what_is_too_long_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 1001)
    with pytest.raises(IntegrityError, match="too long"):
        texts(tmp_path / "long")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    with pytest.raises(IntegrityError, match="too long"):
        texts(tmp_path / "sparse")


def test_a_bomb_gives_no_more_than_a_log_may_have(tmp_path: Path) -> None:
    bomb = gzip.compress(gzip.compress(bytes(1 << 28)))  # 256 MiB of zeros in a kilobyte
    (tmp_path / "bomb").write_bytes(gzip.decompress(bomb))
    (tmp_path / "members").write_bytes(gzip.compress(bytes(100)) * 30)
    tracemalloc.start()
    try:
        for name in ("bomb", "members"):
            with pytest.raises(IntegrityError, match="too long unpacked"):
                texts(tmp_path / name, limits=LogLimits(file_bytes=1 << 20, raw_bytes=2000))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_files_are_counted_over_all_folders(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.json").write_bytes(b"x")
    assert len(texts(tmp_path, limits=LogLimits(files=4))) == 4
    with pytest.raises(IntegrityError, match="too many files"):
        texts(tmp_path)
