from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachepipe.runtime import attempts

DIGEST = "d" * 64


def crash(state: Path, start_id: str) -> None:
    """A service that begins and is killed."""
    code = (
        "import os, signal, sys\nfrom cachepipe.runtime import attempts\n"
        f"attempt = attempts.begin(sys.argv[1], {DIGEST!r}, sys.argv[2])\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(state), start_id], check=False)


def test_starts_that_were_killed_are_counted(tmp_path: Path) -> None:
    crash(tmp_path, "a")
    crash(tmp_path, "b")
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time()) == 2
    assert attempts.unfinished(str(tmp_path), "e" * 64, time.time()) == 0


def test_a_finished_start_is_not_counted(tmp_path: Path) -> None:
    attempt = attempts.begin(str(tmp_path), DIGEST, "a")
    attempt.finish()
    attempt.finish()
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time()) == 0
    assert not os.listdir(tmp_path / "attempts" / DIGEST)


def test_a_living_start_is_not_counted(tmp_path: Path) -> None:
    attempt = attempts.begin(str(tmp_path), DIGEST, "a")
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time()) == 0
    attempts.clear(str(tmp_path), DIGEST)
    assert os.listdir(tmp_path / "attempts" / DIGEST) == ["a"]
    attempt.finish()


def test_the_ranks_of_one_start_share_its_mark(tmp_path: Path) -> None:
    first = attempts.begin(str(tmp_path), DIGEST, "a")
    second = attempts.begin(str(tmp_path), DIGEST, "a")
    second.finish()
    assert os.listdir(tmp_path / "attempts" / DIGEST) == ["a"]
    first.finish()


def test_old_marks_are_not_counted(tmp_path: Path) -> None:
    crash(tmp_path, "a")
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time() + 901) == 0
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time() + 1800, window_s=3600) == 1


def test_cleared_marks_are_gone(tmp_path: Path) -> None:
    crash(tmp_path, "a")
    attempts.clear(str(tmp_path), DIGEST)
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time()) == 0


def test_the_mark_tells_process_and_time(tmp_path: Path) -> None:
    attempt = attempts.begin(str(tmp_path), DIGEST, "a")
    mark = json.loads((tmp_path / "attempts" / DIGEST / "a").read_text())
    assert mark["pid"] == os.getpid()
    assert abs(mark["time"] - time.time()) < 10
    attempt.finish()


@pytest.mark.parametrize("text", [b"", b"garbage", b'{"time": "soon"}', b"[]"])
def test_a_cut_mark_counts_by_its_file_time(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "attempts" / DIGEST).mkdir(parents=True)
    (tmp_path / "attempts" / DIGEST / "a").write_bytes(text)
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time()) == 1


def test_a_state_that_cannot_be_written_never_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    attempts.begin(str(tmp_path / "file"), DIGEST, "a").finish()
    assert attempts.unfinished(str(tmp_path / "file"), DIGEST, time.time()) == 0
    attempts.clear(str(tmp_path / "file"), DIGEST)


def test_a_start_id_cannot_leave_the_folder(tmp_path: Path) -> None:
    attempts.begin(str(tmp_path / "state"), DIGEST, "../../../escaped").finish()
    assert not (tmp_path / "escaped").exists()
    assert os.listdir(tmp_path) == ["state"]
