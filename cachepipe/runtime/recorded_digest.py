"""The digest of a large installed file, as its installer wrote it down, in place of reading the file.

Source: Binary distribution format, `RECORD` (PyPA specifications): path, `sha256=` digest in URL-safe base64 without padding, size.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import inspect
import os
from collections.abc import Callable
from glob import escape, glob
from types import FunctionType, SimpleNamespace
from typing import Any


def recorded_digest(path: str, package: str) -> str | None:
    """Returns the SHA-256 of a file of a package, hexadecimal, if the file is as it was installed: its size is the recorded one,
    and it is not younger than the record, which an installer writes last. None: that cannot be told, or is not so.

    Args:
        path: the file, absolute, below the folder of the package.
        package: the folder's name, which is the distribution's too.
    """
    site = path.rpartition(os.path.join(os.sep, package, ""))[0]
    records = glob(os.path.join(escape(site), f"{package}-*.dist-info", "RECORD"))
    if len(records) != 1:
        return None
    name = os.path.relpath(path, site).replace(os.sep, "/")
    try:
        facts, recorded = os.stat(path), os.stat(records[0])
        with open(records[0], encoding="utf-8") as file:
            rows = [line.rstrip("\n").split(",") for line in file if line.startswith(f"{name},")]
        ((_, digest, size),) = rows
        algorithm, _, encoded = digest.partition("=")
        found = base64.urlsafe_b64decode(f"{encoded}=")
    except (OSError, UnicodeDecodeError, ValueError, binascii.Error):
        return None
    is_as_installed = size == str(facts.st_size) and facts.st_mtime_ns <= recorded.st_mtime_ns
    return found.hex() if is_as_installed and algorithm == "sha256" and len(found) == 32 else None


def with_known_digest(function: Callable[[], str], path: str, digest: str) -> Callable[[], str]:
    """Returns a function that hashes files of which one need not be read; all else it does as ever.

    Args:
        function: finds `open` and `hashlib` among its module's names. The result is a copy with its own, so that nothing of the
            module changes, whatever else runs there.
        path: the file as the function names it.
        digest: its SHA-256.
    """
    plain: Any = inspect.unwrap(function)
    names = {
        **plain.__globals__,
        "open": lambda name, *words: _Known(digest) if name == path else open(name, *words),  # noqa: SIM115
        "hashlib": SimpleNamespace(sha256=_Hash),
    }
    copy = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)

    @functools.cache
    @functools.wraps(plain)
    def quick() -> str:
        try:
            found: str = copy()
        except Exception:  # noqa: BLE001 - it may want more of `open` and `hashlib` than there is here: all compiles need the key
            return function()
        return found

    return quick


class _Known:
    """Stands for the open file: what it reads is its digest, once."""

    def __init__(self, digest: str) -> None:
        self._chunks = [_Digest(digest, "ascii")]

    def __enter__(self) -> _Known:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, _: int = -1) -> bytes:
        return self._chunks.pop() if self._chunks else b""


class _Digest(bytes):
    """The digest of what would have been read."""


class _Hash:
    """SHA-256 that takes a digest for the bytes of which it is."""

    def __init__(self, data: bytes = b"") -> None:
        self._real, self._known = hashlib.sha256(), ""
        self.update(data)

    def update(self, data: bytes) -> None:
        if isinstance(data, _Digest):
            self._known = data.decode("ascii")
        else:
            self._real.update(data)

    def hexdigest(self) -> str:
        return self._known or self._real.hexdigest()
