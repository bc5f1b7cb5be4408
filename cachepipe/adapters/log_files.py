"""Log files that a person names: files and folders of them, plain or gzip, never more bytes than a log may have."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from cachepipe.adapters.given_file import is_folder, read_given, unreadable
from cachepipe.domain.kms_log import HINT, LOG_LIMITS, LogLimits
from cachepipe.errors import IntegrityError, UsageError

_GZIP = b"\x1f\x8b"
_SUFFIXES = (".json", ".json.gz")
_DIGESTS = "CloudTrail-Digest"
"""Beside its logs CloudTrail keeps digests of them, for `aws cloudtrail validate-logs`."""


def read_logs(paths: Sequence[Path], limits: LogLimits = LOG_LIMITS) -> Iterator[tuple[str, bytes]]:
    """Yields name and text of every log file: a file as it is, of a folder what is below it and named as logs are.

    Raises:
        UsageError: absent, not a regular file, not readable, or a folder without a log file.
        IntegrityError: longer than a log, not whole, or too many files.
    """
    count = 0
    for path in paths:
        try:
            names = _below(path) if is_folder(path) else [path]
        except UsageError as error:
            error.hint = HINT
            raise
        for name in names:
            count += 1
            if count > limits.files:
                raise IntegrityError(str(path), "too many files", wanted=f"<= {limits.files}", hint=HINT)
            yield str(name), _unpacked(read_given(name, limits.file_bytes), str(name), limits)


def _below(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise unreadable(Path(error.filename or folder), error) from error

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if name != _DIGESTS)
        found += [Path(place, name) for name in sorted(names) if name.endswith(_SUFFIXES)]
    if not found:
        raise UsageError(f"no log file (`*.json`, `*.json.gz`) in {folder}")
    return found


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
