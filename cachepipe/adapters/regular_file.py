"""Reads files that others may have put there: regular ones alone, no more of them than is allowed, never waiting.

A pipe would hold its reader for ever, and /dev/zero has no end.
"""

from __future__ import annotations

import errno
import os
import stat

_FLAGS = (
    os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
)  # without O_NONBLOCK the opening of a pipe waits for its writer


def open_regular(path: str | os.PathLike[str], *, follows_links: bool = True) -> int:
    """Returns a descriptor of a regular file.

    Raises:
        IsADirectoryError: a folder.
        OSError: with EINVAL and the words "not a regular file" for what is none; else what the system says.
    """
    name = os.fspath(path)
    try:
        handle = os.open(name, _FLAGS if follows_links else _FLAGS | os.O_NOFOLLOW)
    except ValueError as error:
        raise OSError(errno.EINVAL, "not a path", ascii(name)) from error
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device without a driver
            raise _odd(name) from error
        raise
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(mode):
            raise _odd(name)
    except OSError:
        os.close(handle)
        raise
    return handle


def read_regular(path: str | os.PathLike[str], limit_bytes: int, *, follows_links: bool = True) -> bytes:
    """Returns a regular file's bytes, of one that grows meanwhile at most `limit_bytes` + 1.

    Raises:
        OSError: as `open_regular`; EOVERFLOW for a file that is longer than `limit_bytes`.
    """
    with os.fdopen(open_regular(path, follows_links=follows_links), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit_bytes:
            raise OSError(errno.EOVERFLOW, f"longer than {limit_bytes} bytes", os.fspath(path))
        return file.read(limit_bytes + 1)


def is_odd(error: OSError) -> bool:
    """Tells whether `open_regular` refused what stands there, though it could be opened."""
    return error.errno == errno.EINVAL and error.strerror == _ODD


_ODD = "not a regular file"


def _odd(path: str) -> OSError:
    return OSError(errno.EINVAL, _ODD, path)
