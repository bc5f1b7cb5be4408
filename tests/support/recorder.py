"""A server that knows no object and remembers who asked for what: the way to see what a client really sends."""

from __future__ import annotations

import re
import socket
import threading
from typing import NamedTuple

_ANSWER = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>none</Message></Error>"


class Seen(NamedTuple):
    url: str
    """Scheme, host and path that were asked for; of a proxied request as it stands in its first line."""
    is_proxied: bool
    access_key: str
    """Empty: the request is not signed."""
    region: str
    token: str


class Recorder:
    """Listens on loopback from `with` on; every answer is 404 NoSuchKey."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Recorder:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as asked:
            while line := asked.readline().decode("latin-1"):
                fields = {}
                while (text := asked.readline().decode("latin-1").strip()) != "":
                    name, _, value = text.partition(":")
                    fields[name.strip().lower()] = value.strip()
                self.seen.append(_seen(line, fields))
                head = (
                    f"HTTP/1.1 404 Not Found\r\nContent-Type: application/xml\r\nContent-Length: {len(_ANSWER)}\r\n\r\n"
                )
                client.sendall(head.encode() + _ANSWER)


def _seen(line: str, fields: dict[str, str]) -> Seen:
    target = line.split(" ")[1].partition("?")[0]
    is_proxied = target.startswith("http")
    scope = re.search(r"Credential=([^/]+)/\d+/([^/]+)/s3", fields.get("authorization", ""))
    return Seen(
        target if is_proxied else f"http://{fields.get('host', '')}{target}",
        is_proxied,
        scope[1] if scope else "",
        scope[2] if scope else "",
        fields.get("x-amz-security-token", ""),
    )


class SilentServer:
    """Accepts connections and never says a word."""

    def __enter__(self) -> SilentServer:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
