"""Running a command as another user id, as containers do: no passwd entry, no HOME of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache

OTHER_ID = 12345


@cache
def can_switch() -> bool:
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

    As root: a real change of the id where the interpreter is reachable for others, else a user namespace, in which root's
    files appear as those of 12345. Without root's rights ids cannot be changed, and the command stays as it is.
    """
    if os.geteuid() != 0:
        return argv
    if can_switch():
        tool, options = "setpriv", [f"--reuid={OTHER_ID}", f"--regid={OTHER_ID}", "--clear-groups"]
    else:
        tool, options = "unshare", ["--user", f"--map-user={OTHER_ID}", f"--map-group={OTHER_ID}"]
    found = shutil.which(tool)
    assert found is not None, f"{tool} is needed: apt-get install util-linux"
    return [found, *options, "--", *argv]


def give_to_other_user(path: str | os.PathLike[str]) -> None:
    """Makes a folder the other user's, where ids are really changed."""
    if can_switch():
        os.chown(path, OTHER_ID, OTHER_ID)
