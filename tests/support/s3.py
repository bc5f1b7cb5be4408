"""S3 stores of tests: addresses on the run's server, each with a prefix of its own, and the environment that opens them."""

from __future__ import annotations

import itertools
import os
from urllib.parse import quote

from cachepipe.adapters.store import Store, open_store
from tests.support import authority, seaweed

_NUMBERS = itertools.count()


def address(endpoint: str, **parameters: str) -> str:
    """Returns the address of an empty store on a server."""
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in {"endpoint": endpoint, **parameters}.items())
    return f"s3://{seaweed.S3_BUCKET}/t{os.getpid()}-{next(_NUMBERS)}?{query}"


def opened(url: str) -> Store:
    """Returns the store at any address, under the tests' own keys."""
    return open_store(url, authority.shared())


def copy_store(source: Store, target: Store) -> None:
    """Copies every object, hints last."""
    for key in sorted(source.list(""), key=lambda key: key.endswith("/hint")):
        data = source.get(key, 1 << 30)
        assert data is not None
        if key.endswith("/hint"):
            target.put_hint(key, data)
        else:
            target.put_if_absent(key, data)


def environment(keys: tuple[str, str] = seaweed.ADMIN, **more: str) -> dict[str, str]:
    """Returns AWS's variables for an identity of the server; no file and no metadata service is asked."""
    return {
        "AWS_ACCESS_KEY_ID": keys[0],
        "AWS_SECRET_ACCESS_KEY": keys[1],
        "AWS_REGION": seaweed.REGION,
        "AWS_CONFIG_FILE": "/nonexistent/config",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
        "AWS_EC2_METADATA_DISABLED": "true",
        **authority.shared_environment(),
        **more,
    }
