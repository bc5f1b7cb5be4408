"""A store that takes connections and never answers, as behind a firewall that forgets them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

URL = "s3://bucket/prefix"


@contextmanager
def silent_store() -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """Gives the listening socket, whose `accept` returns when the store is asked, and the variables that lead there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield (
            server,
            {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_REGION": "eu-west-1",
            },
        )
