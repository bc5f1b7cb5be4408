"""The digest of a large installed file, as its installer wrote it down, in place of reading the file.

Source: Binary distribution format, `RECORD` (PyPA specifications): path, `sha256=` digest in URL-safe base64 without padding, size.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import os
from collections.abc import Callable
from glob import escape, glob
from types import SimpleNamespace
from typing import Any


def recorded_digest(path: str, package: str) -> str | None:
    """Returns the SHA-256 of a file of a package, hexadecimal, if the file is as it was installed: its size is the recorded one,
    and it is not younger than the record, which an installer writes last. None: that cannot be told, or is not so.

    Args:
        path: the file, absolute, below the folder of the package.
        package: the folder's name, which is the distribution's too.
    """
    site = path.partition(os.path.join(os.sep, package, ""))[0]
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


def with_known_digest(function: Callable[[], str], module: Any, path: str, digest: str) -> Callable[[], str]:
    """Returns a function that hashes files of which one need not be read; all else it does as ever.

    Args:
        function: of `module`, where it finds `open` and `hashlib`.
        path: the file as the function names it.
        digest: its SHA-256.
    """

    @functools.cache
    @functools.wraps(function)
    def quick() -> str:
        names = {
            "open": lambda name, *words: _Known(digest) if name == path else open(name, *words),  # noqa: SIM115
            "hashlib": SimpleNamespace(sha256=_Hash),
        }
        before = {name: vars(module)[name] for name in names if name in vars(module)}
        vars(module).update(names)
        try:
            return function()
        finally:
            for name in names:
                del vars(module)[name]
            vars(module).update(before)

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
