"""Starting the example service and asking it over HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.release import SERVICE

START_LIMIT_S = 240.0


class RunningService:
    def __init__(self, process: subprocess.Popen[str], port_file: Path, log: Path) -> None:
        self.process, self.port_file, self.log = process, port_file, log
        self.statuses: list[int] = []

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Returns status and JSON body."""
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port_file.read_text()}{path}"
        try:
            with urllib.request.urlopen(url, data, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_until_ready(self) -> list[int]:
        """Returns the statuses that /healthz gave until it said 200."""
        statuses = []
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"service ended: {self.process.returncode}\n{self.log.read_text()}"
            if self.port_file.exists():
                statuses.append(self.ask("/healthz")[0])
                if statuses[-1] == 200:
                    return statuses
            time.sleep(0.05)
        raise AssertionError(f"not ready after {START_LIMIT_S} s\n{self.log.read_text()}")


@contextmanager
def running_service(prefix: list[str], env: Mapping[str, str], folder: Path, cwd: Path) -> Iterator[RunningService]:
    """Starts `prefix… python service.py`, and ends it with SIGTERM."""
    port_file, log = folder / "port", folder / "service.log"
    argv = [*prefix, sys.executable, str(SERVICE), "--port", "0", "--port-file", str(port_file)]
    with log.open("w") as stderr:
        process = subprocess.Popen(argv, env=dict(env), cwd=cwd, stdout=stderr, stderr=stderr, text=True)
        try:
            yield RunningService(process, port_file, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
