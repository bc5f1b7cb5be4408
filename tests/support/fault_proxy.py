"""A proxy before a real S3 server that loses, delays, cuts and falsifies what passes; loopback and http only.

    with FaultProxy(server.ports[0]) as proxy:
        proxy.add(Fault("status", method="GET", path="/packs/", times=2, status=503, code="SlowDown"))
        store = open_store(s3.address(proxy.url))
        …
        assert proxy.count("GET", "/packs/") == 3

The Host header passes unchanged, and a client signs the host that it asks: so SigV4 signatures stay valid.

action      what the client sees
status      an answer with that status and S3 error code; the server is not asked
drop        the connection is reset; the server is not asked
lost        the server has carried the request out, and the connection is reset before its answer
truncate    the body ends after `at` bytes, the length says more
reset       as `truncate`, by a reset
flip        one bit of the byte at `at` is another (from the end, if negative)
longer      `at` more bytes than the object has, and a length that says so
shorter     the object without its last `at` bytes, and a length that says so
            (these three: of a PUT the request, of all else the answer)
stale       `content` in place of the object
stall       nothing for `seconds` after `at` bytes
delay       nothing for `seconds` before the head
hang        nothing for `seconds`, then a reset; the server is not asked
bare        an answer without the digest that the server computed
absent      404 for an object that is there: a stale read
hide        403 AccessDenied instead of 404: what AWS answers to a role that may not list
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

_CHUNK = 1 << 16
_IN_BODY = ("truncate", "reset", "flip", "longer", "shorter", "stall", "stale")


@dataclass
class Fault:
    action: str
    method: str = ".*"
    path: str = ""
    """Regular expression, searched in the target."""
    header: str = ""
    """Regular expression, searched in the request's lines, such as `x-amz-acl: private`."""
    skip: int = 0
    """Matching requests that pass first."""
    times: int | None = 1
    """Matching requests that are hit then; None: all."""
    status: int = 503
    code: str = "SlowDown"
    message: str = "injected"
    at: int = 0
    seconds: float = 0.0
    content: bytes = b""
    headers: tuple[str, ...] = ()
    """Whole lines added to an answer of `status`."""
    seen: int = 0
    hits: int = 0

    def takes(self, method: str, target: str, lines: str) -> bool:
        """Tells whether this request is hit, and counts it."""
        if not re.fullmatch(self.method, method) or not re.search(self.path, target):
            return False
        if not re.search(self.header, lines, re.IGNORECASE):
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


class Request(NamedTuple):
    at: float
    """`time.monotonic` when its head was read."""
    method: str
    target: str
    action: str
    """Of the fault that hit it, or empty."""
    condition: str = ""
    """Its If-None-Match."""


class _Head(NamedTuple):
    line: str
    fields: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str:
        return next((value for key, value in self.fields if key.lower() == name), "")

    def without(self, *names: str) -> _Head:
        return _Head(self.line, tuple(row for row in self.fields if row[0].lower() not in names))

    def data(self) -> bytes:
        return "\r\n".join([self.line, *(f"{name}: {value}" for name, value in self.fields), "", ""]).encode("latin-1")


class _Over(Exception):
    """This connection has been ended on purpose."""


@dataclass
class FaultProxy:
    port: int
    """Of the server."""
    faults: list[Fault] = field(default_factory=list)
    log: list[Request] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    """`time.monotonic` of every connection."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self.faults.append(fault)
        return fault

    def clear(self) -> None:
        """Forgets faults and log."""
        with self._lock:
            self.faults.clear()
            self.log.clear()
            self.accepted.clear()

    def requests(self, method: str = ".*", path: str = "") -> list[Request]:
        with self._lock:
            return [row for row in self.log if re.fullmatch(method, row.method) and re.search(path, row.target)]

    def count(self, method: str = ".*", path: str = "") -> int:
        return len(self.requests(method, path))

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted.append(time.monotonic())
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        upstream = socket.create_connection(("127.0.0.1", self.port))
        upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with client.makefile("rb", _CHUNK) as asked, upstream.makefile("rb", _CHUNK) as answered:
                while self._one(client, asked, upstream, answered):
                    pass
        except (OSError, ValueError, _Over):
            pass
        finally:
            upstream.close()
            client.close()

    def _pick(self, head: _Head) -> Fault | None:
        method, target, _ = head.line.split(" ", 2)
        lines, condition = head.data().decode("latin-1"), head.get("if-none-match")
        with self._lock:
            fault = next((fault for fault in self.faults if fault.takes(method, target, lines)), None)
            self.log.append(Request(time.monotonic(), method, target, fault.action if fault else "", condition))
            return fault

    def _one(self, client: socket.socket, asked: BinaryIO, upstream: socket.socket, answered: BinaryIO) -> bool:
        """Passes one request and its answer; False when the client is done."""
        head = _read_head(asked)
        if head is None:
            return False
        method = head.line.partition(" ")[0]
        fault = self._pick(head)
        action = fault.action if fault else ""
        if fault and action in ("delay", "hang"):
            time.sleep(fault.seconds)
        if action in ("drop", "hang"):
            _reset(client)
        if head.get("expect").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault and action in ("status", "absent"):
            for _ in _body(head, asked):
                pass
            client.sendall(_error(method, fault))
            return True
        head, sent = head.without("expect"), list(_body(head, asked))
        if fault and method == "PUT" and action in ("flip", "longer", "shorter"):
            head, sent = _falsified(head, sent, fault)
        upstream.sendall(head.data() + b"".join(sent))
        answer = _read_head(answered)
        while answer is not None and answer.line.startswith("HTTP/1.1 100"):
            answer = _read_head(answered)
        if answer is None:
            _reset(client)
            return False
        status = int(answer.line.split()[1])
        has_body = method != "HEAD" and status not in (204, 304)
        pieces = list(_body(answer, answered)) if has_body else []
        if action == "lost":
            _reset(client)
        if action == "hide" and status == 404:
            client.sendall(_error(method, Fault("status", status=403, code="AccessDenied")))
            return True
        is_hit = action == "bare" or (action in _IN_BODY and status in (200, 206) and method != "PUT")
        _send_answer(client, answer, pieces, fault if is_hit else None)
        return answer.get("connection").lower() != "close"


def _send_answer(client: socket.socket, head: _Head, pieces: list[bytes], fault: Fault | None) -> None:
    if fault is None:
        client.sendall(head.data() + b"".join(pieces))
        return
    head, pieces = _falsified(head, pieces, fault)
    body = b"".join(pieces)
    client.sendall(head.data())
    if fault.action not in ("truncate", "reset", "stall"):
        client.sendall(body)
        return
    client.sendall(body[: fault.at])
    if fault.action == "reset":
        _reset(client)
    if fault.action == "truncate":
        raise _Over
    time.sleep(fault.seconds)
    client.sendall(body[fault.at :])


def _falsified(head: _Head, pieces: list[bytes], fault: Fault) -> tuple[_Head, list[bytes]]:
    body = bytearray(b"".join(pieces))
    if fault.action == "bare":
        head = head.without("x-amz-checksum-sha256")
    if fault.action == "flip" and body:
        body[fault.at % len(body)] ^= 0x40
    if fault.action in ("longer", "shorter", "stale"):
        cut = body[: max(0, len(body) - fault.at)]
        body = {"longer": body + b"x" * fault.at, "shorter": cut, "stale": bytearray(fault.content)}[fault.action]
        head = _Head(head.line, (*head.without("content-length").fields, ("Content-Length", str(len(body)))))
    return head, [bytes(body)]


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise _Over


def _error(method: str, fault: Fault) -> bytes:
    status, code = (404, "NoSuchKey") if fault.action == "absent" else (fault.status, fault.code)
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{fault.message}</Message></Error>".encode()
    lines = [f"HTTP/1.1 {status} Injected", "Content-Type: application/xml", f"Content-Length: {len(text)}"]
    head = "\r\n".join([*lines, *fault.headers, "", ""]).encode()
    return head if method == "HEAD" else head + text


def _read_head(stream: BinaryIO) -> _Head | None:
    line = stream.readline(_CHUNK)
    if not line:
        return None
    fields = []
    while (text := stream.readline(_CHUNK)) not in (b"\r\n", b"\n", b""):
        name, _, value = text.partition(b":")
        fields.append((name.strip().decode("latin-1"), value.strip().decode("latin-1")))
    return _Head(line.decode("latin-1").rstrip("\r\n"), tuple(fields))


def _body(head: _Head, stream: BinaryIO) -> Iterator[bytes]:
    """Yields a body as it is on the wire, chunk headers and trailers included."""
    if "chunked" in head.get("transfer-encoding"):
        yield from _chunks(stream)
        return
    left = int(head.get("content-length") or 0)
    while left:
        piece = stream.read(min(left, _CHUNK))
        if not piece:
            raise _Over
        left -= len(piece)
        yield piece


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while True:
        size = stream.readline(_CHUNK)
        yield size
        length = int(size.split(b";")[0], 16)
        if length == 0:
            break
        yield stream.read(length + 2)
    while (line := stream.readline(_CHUNK)) not in (b"\r\n", b""):
        yield line
    yield b"\r\n"
