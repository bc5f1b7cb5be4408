"""Reads lock files that a command line names."""

from __future__ import annotations

import os

from cachepipe.adapters.regular_file import read_regular
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.lock import Lock, read_lock
from cachepipe.errors import IntegrityError, UsageError


def read_lock_file(path: str | os.PathLike[str]) -> Lock:
    """Returns the lock in a file.

    Raises:
        UsageError: it cannot be read.
        IntegrityError: it is no lock file; the path is named.
    """
    name = os.fspath(path)
    try:
        return read_lock(read_regular(name, LIMITS.index_bytes))
    except OSError as error:
        hint = "write it with `cachepipe lock`, or mount the folder that has it"
        raise UsageError(f"lock file `{name}` cannot be read ({error.strerror})", hint=hint) from error
    except IntegrityError as error:
        named = IntegrityError(f"`{name}`: {error.what}", error.problem, wanted=error.wanted, found=error.found)
        named.hint = error.hint
        raise named from error
