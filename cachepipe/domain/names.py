"""The names of releases and channels."""

from __future__ import annotations

import re

from cachepipe.errors import UsageError

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?", re.ASCII)


def is_name(text: str) -> bool:
    """Tells whether a text can stand in keys and paths: 1–64 of `a-z0-9._-`, first and last alphanumeric."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def check_name(name: str, what: str) -> str:
    """Returns `name` if it is one, see `is_name`.

    Raises:
        UsageError: it cannot.
    """
    if not is_name(name):
        raise UsageError(f"{what} is not 1-64 characters of a-z 0-9 . _ -: {name[:80]!r}")
    return name
