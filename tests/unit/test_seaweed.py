"""One S3 server for all processes of a test run, however they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.release import REPOSITORY
from tests.support.seaweed import _is_free, _is_up, shared

USE = """
import json, sys
from pathlib import Path
from tests.support.seaweed import shared
with shared(Path(sys.argv[1])) as server:
    print(json.dumps(server.ports), flush=True)
    sys.stdin.read()
"""


def user(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", USE, str(folder)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def end(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)
    process.communicate()


def test_parallel_test_processes_share_a_server_that_ends_with_the_last_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "seaweed"
    first, ports = user(folder)
    second, same = user(folder)
    assert same == ports
    end(first, signal.SIGKILL)  # who started it is gone
    with shared(folder) as server:
        assert list(server.ports) == ports and _is_up(server)
    assert _is_up(server)
    end(second, signal.SIGKILL)
    give_up = time.monotonic() + 30
    while server.folder.exists() or not _is_free(ports[0]):
        assert time.monotonic() < give_up, "the server outlives its users"
        time.sleep(0.02)
    assert not (folder / "server.json").exists()
