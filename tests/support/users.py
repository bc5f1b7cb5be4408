"""Running a command as another user id, as containers do: no passwd entry, no HOME of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache

OTHER_ID = 12345


@cache
def _can_switch() -> bool:
    """Tells whether a real change of the user id leaves the interpreter reachable."""
    if os.geteuid() != 0:
        return False
    try:
        probe = subprocess.run(
            [sys.executable, "-c", "import torch"],
            user=OTHER_ID,
            group=OTHER_ID,
            extra_groups=[],
            capture_output=True,
            check=False,
            cwd="/",
        )
    except PermissionError:
        return False
    return probe.returncode == 0


def as_other_user(argv: list[str]) -> list[str]:
    """Returns the command that runs `argv` as user 12345.

    A real change of the id where the interpreter is reachable for others; else a user namespace, in which this process's
    own files appear as those of 12345.
    """
    if _can_switch():
        tool = shutil.which("setpriv")
        assert tool is not None
        return [tool, f"--reuid={OTHER_ID}", f"--regid={OTHER_ID}", "--clear-groups", "--", *argv]
    tool = shutil.which("unshare")
    assert tool is not None
    return [tool, "--user", f"--map-user={OTHER_ID}", f"--map-group={OTHER_ID}", "--", *argv]


def give_to_other_user(path: str | os.PathLike[str]) -> None:
    """Makes a folder the other user's, where ids are really changed."""
    if _can_switch():
        os.chown(path, OTHER_ID, OTHER_ID)
