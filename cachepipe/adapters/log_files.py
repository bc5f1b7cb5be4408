"""Log files that a person names: files and folders of them, plain or gzip, never more bytes than a log may have."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cachepipe.adapters.given_file import is_folder, read_given, unreadable
from cachepipe.domain.kms_log import HINT, LOG_LIMITS, LogLimits
from cachepipe.domain.printable import printable
from cachepipe.errors import IntegrityError, UsageError

_GZIP = b"\x1f\x8b"
_SUFFIXES = (".json", ".json.gz")
"""In letters of any case."""
_DIGESTS = "CloudTrail-Digest"
"""Beside its logs CloudTrail keeps digests of them, for `aws cloudtrail validate-logs`."""


class LogFiles(NamedTuple):
    logs: list[Path]
    others: list[Path]
    """In the folders, and not named as logs are."""


def find_logs(paths: Sequence[Path], limits: LogLimits = LOG_LIMITS) -> LogFiles:
    """Returns what to read: a file as it is, of a folder what is below it and named as logs are.

    Raises:
        UsageError: absent, not readable, a folder without a log file, or with a link to a folder, which is not followed: it may lead round.
        IntegrityError: too many files.
    """
    found = LogFiles([], [])
    for path in paths:
        try:
            if is_folder(path):
                _look_below(path, found, limits)
            else:
                found.logs.append(path)
        except UsageError as error:
            error.hint = HINT
            raise
    _check_count(found, limits)
    return found


def read_logs(files: Iterable[Path], limits: LogLimits = LOG_LIMITS) -> Iterator[tuple[str, bytes]]:
    """Yields name and text of every file.

    Raises:
        UsageError: absent, not a regular file, or not readable.
        IntegrityError: longer than a log, or not whole.
    """
    for file in files:
        what = printable(str(file))
        yield what, _unpacked(read_given(file, limits.file_bytes), what, limits)


def _look_below(folder: Path, found: LogFiles, limits: LogLimits) -> None:
    def fail(error: OSError) -> None:
        raise unreadable(Path(error.filename or folder), error) from error

    count = len(found.logs)
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if name != _DIGESTS)
        for link in (Path(place, name) for name in folders):
            if link.is_symlink():
                raise UsageError(
                    f"a link to a folder, which is not followed: {link}: name that folder as well, and take the link away"
                )
        for name in sorted(names):
            (found.logs if name.lower().endswith(_SUFFIXES) else found.others).append(Path(place, name))
        _check_count(found, limits)
    if len(found.logs) == count:
        raise UsageError(f"no log file (`*.json`, `*.json.gz`) in {folder}")


def _check_count(found: LogFiles, limits: LogLimits) -> None:
    if len(found.logs) + len(found.others) > limits.files:
        raise IntegrityError("logs", "too many files", wanted=f"<= {limits.files}", hint=HINT)


def _unpacked(data: bytes, what: str, limits: LogLimits) -> bytes:
    """Returns the text, of which a bomb gives no more than the limit and one byte."""
    if not data.startswith(_GZIP):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            text = file.read(limits.raw_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise IntegrityError(what, f"not whole: {error}", hint=HINT) from error
    if len(text) > limits.raw_bytes:
        raise IntegrityError(what, "too long unpacked", wanted=f"<= {limits.raw_bytes} bytes", hint=HINT)
    return text
