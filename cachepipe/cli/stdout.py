"""The streams of a command: every text can be written to them, and stdout says so when it takes no more."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from typing import Any


class OutputError(Exception):
    """Standard output took no more; no OSError, so that nobody below takes it for a failure of a file or a store."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.error = error


class _Output(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            while (count := super().write(data)) is None:  # a full pipe that its other users made non-blocking
                select.select([], [self.fileno()], [])
        except OSError as error:
            raise OutputError(error) from error
        return count


class _Talk(io.FileIO):
    def write(self, data: Any) -> int:
        """Drops what cannot be written: an hour of building does not end because nobody listens."""
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


_PLAIN = {"–": "-", "→": "->", "×": "x", "÷": "/", "·": "-", "…": "...", "≤": "<=", "≥": ">=", "±": "+/-", "≠": "!="}


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(char) or char.encode("ascii", "backslashreplace").decode() for char in text), error.end


PLAIN = "cachepipe.plain"
"""Name of the error handler that writes in ASCII what an encoding does not have."""
codecs.register_error(PLAIN, _plain)


def guard() -> None:
    """Makes stdout a stream that says by `OutputError` that it takes no more, and stderr one that takes all.

    Every text can be written to both. Only the interpreter's own streams are changed: what a test or a program put there is theirs.
    """
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        talk = io.BufferedWriter(_Talk(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(talk, encoding=encoding, errors=PLAIN, line_buffering=True)
    own = sys.stdout
    if isinstance(own, io.TextIOWrapper) and own is sys.__stdout__:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(1, "w", closefd=False)),
            encoding=own.encoding,
            errors=PLAIN,
            line_buffering=own.line_buffering,
        )


def abandon() -> None:
    """Points stdout, which failed, at nothing: the interpreter's last flush would complain of what stayed in it."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
    except (AttributeError, OSError, ValueError):
        return
