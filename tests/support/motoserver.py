"""moto's S3 server on loopback: much faster at conditional writes than a real one, and alike in what races need of it.

It accepts any key and any damaged body, so nothing but counts and winners may be tested with it.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.seaweed import S3_BUCKET


@dataclass(frozen=True)
class Moto:
    """A running server; the bucket `S3_BUCKET` is there."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def start(limit_s: float = 60.0) -> Moto:
    """Returns a server that answers, with an empty bucket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    program = Path(sys.executable).with_name("moto_server")
    process = subprocess.Popen(
        [str(program), "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("PUT", f"/{S3_BUCKET}")
            if connection.getresponse().status == 200:
                return Moto(process, port)
        except OSError:
            time.sleep(0.05)
    process.kill()
    process.wait()
    raise RuntimeError("moto's server does not start")
