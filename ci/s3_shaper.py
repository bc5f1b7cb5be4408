"""A server with the network profile of S3: a delay before the first byte, and a limit of each connection's speed.

    ci/s3_shaper.py ROOT DELAY_MS MB_PER_S     prints its port; serves GET and HEAD of ROOT/<s3 bucket>/<key>, with ranges

It costs next to no CPU (sendfile), so that on a small machine it does not take the time that is measured; it checks no
signature. 0 is no delay, or no limit.
"""

from __future__ import annotations

import contextlib
import email.utils
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

_STEP = 1 << 18


def serve(root: Path, delay_s: float, bytes_per_s: float) -> None:
    """Serves until the process ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_connection, args=(client, root, delay_s, bytes_per_s), daemon=True).start()


def _connection(client: socket.socket, root: Path, delay_s: float, bytes_per_s: float) -> None:
    with contextlib.suppress(OSError), client, client.makefile("rb") as asked:
        while line := asked.readline().decode("latin-1"):
            span = _header(asked)
            time.sleep(delay_s)
            method, target, _ = line.split(" ", 2)
            _answer(client, method, root / unquote(target.partition("?")[0]).lstrip("/"), span, bytes_per_s)


def _header(asked: BinaryIO) -> str:
    """Reads the fields of a request; returns its range."""
    span = ""
    while (text := asked.readline().decode("latin-1").strip()) != "":
        name, _, value = text.partition(":")
        if name.lower() == "range":
            span = value.strip().removeprefix("bytes=")
    return span


def _answer(client: socket.socket, method: str, path: Path, span: str, bytes_per_s: float) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
        facts = os.fstat(handle)
        if not path.is_file():
            raise FileNotFoundError
    except OSError:
        text = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>"
        body = b"" if method == "HEAD" else text
        client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(text) + body)
        return
    try:
        start, end = 0, facts.st_size
        if span:
            first, _, last = span.partition("-")
            start, end = int(first), min(int(last) + 1, end) if last else end
        lines = [
            f"HTTP/1.1 {206 if span else 200} OK",
            f"Content-Length: {end - start}",
            f'ETag: "{facts.st_ino}-{facts.st_size}"',
            f"Last-Modified: {email.utils.formatdate(facts.st_mtime, usegmt=True)}",
            "Accept-Ranges: bytes",
            *([f"Content-Range: bytes {start}-{end - 1}/{facts.st_size}"] if span else []),
        ]
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        if method != "HEAD":
            _send(client, handle, start, end, bytes_per_s)
    finally:
        os.close(handle)


def _send(client: socket.socket, handle: int, start: int, end: int, bytes_per_s: float) -> None:
    began, position = time.monotonic(), start
    while position < end:
        position += os.sendfile(client.fileno(), handle, position, min(_STEP, end - position))
        if bytes_per_s:
            ahead_s = (position - start) / bytes_per_s - (time.monotonic() - began)
            time.sleep(max(0.0, ahead_s))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]) / 1e3, float(sys.argv[3]) * 1e6)
