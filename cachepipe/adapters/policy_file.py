"""Reads the trust policy of this image: what `--trust` names, else `/etc/cachepipe/trust.json`.

Standard library only: a start that finds its folder present compares these bytes' digest and nothing more.
"""

from __future__ import annotations

import os
import stat

from cachepipe.adapters.regular_file import open_regular
from cachepipe.domain.limits import LIMITS
from cachepipe.errors import TrustError

DEFAULT_POLICY = "/etc/cachepipe/trust.json"
"""An image that has it needs no option, and no variable can be forgotten."""


def read_policy_file(path: str) -> bytes | None:
    """Returns the policy's bytes; None: no file is named, and the default one does not exist.

    Args:
        path: what `--trust` names; empty: the default.

    Raises:
        TrustError: a named file does not exist; or it cannot be read, is too long, or others could change it.
    """
    place = path or DEFAULT_POLICY
    try:
        handle = open_regular(place)
    except FileNotFoundError as error:
        if not path:
            return None
        raise _refused(place, error.strerror) from error
    except OSError as error:
        if not path and isinstance(error, NotADirectoryError):
            return None
        raise _refused(place, error.strerror) from error
    try:
        facts = os.fstat(handle)
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
            mode = stat.S_IMODE(facts.st_mode)
            raise _refused(place, f"others could change it (owner uid {facts.st_uid}, mode {mode:04o})")
        data = os.read(handle, LIMITS.small_file_bytes + 1)
    except OSError as error:
        raise _refused(place, error.strerror) from error
    finally:
        os.close(handle)
    if len(data) > LIMITS.small_file_bytes:
        raise _refused(place, f"longer than {LIMITS.small_file_bytes} bytes")
    return data


def _refused(path: str, problem: str | None) -> TrustError:
    return TrustError(
        f"the trust policy cannot be used: {path}: {problem}",
        hint="put it into the image, owned by root (or by the user that runs this), mode 0644",
    )
