"""Files and folders that a person names, read without trust: regular files alone, never more bytes than asked for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cachepipe.adapters.regular_file import is_odd, open_regular
from cachepipe.errors import IntegrityError, UsageError


def read_given(path: Path, limit_bytes: int) -> bytes:
    """Returns the whole file; a pipe or a device neither holds this process nor fills its memory.

    Raises:
        UsageError: absent, not a regular file, or not readable.
        IntegrityError: longer than `limit_bytes`.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit_bytes + 1) if size <= limit_bytes else b""
    except OSError as error:
        if is_odd(error) or isinstance(error, IsADirectoryError):
            hint = "name a file: pipes and devices are not read"
            raise UsageError(f"not a regular file: {path}", hint=hint) from error
        raise unreadable(path, error) from error
    if max(size, len(data)) > limit_bytes:
        raise IntegrityError(str(path), "too long", wanted=f"<= {limit_bytes} bytes", found=max(size, len(data)))
    return data


def is_folder(path: Path) -> bool:
    """Returns whether a folder is at a path.

    Raises:
        UsageError: nothing is there, or it cannot be told.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        raise unreadable(path, error) from error


def files_in(folder: Path, suffix: str) -> list[Path]:
    """Returns what lies in a folder under names that end in `suffix`, in the order of their names; hidden names are left out.

    Raises:
        UsageError: the folder cannot be listed.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
    return [folder / name for name in names if name.endswith(suffix) and not name.startswith(".")]


def unreadable(path: Path, error: OSError) -> UsageError:
    """Returns the error for what the operating system refuses: absent, no permission, a name too long."""
    if isinstance(error, FileNotFoundError):
        return UsageError(f"no such file: {path}", hint="name a file, or the folder of `--report`")
    return UsageError(f"cannot be read: {path}: {error.strerror}", hint="check the path and its permissions")
