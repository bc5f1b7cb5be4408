"""The highest index version that this node has restored, per channel: it may raise the policy's floor, never lower it.

    <state>/floors/<name>@<channel>      a number

A store that plays an older version back is so noticed by every node that has seen a newer one. Whoever can write this file
can do no more than refuse us a start with the cache, or what could be done without the file.
"""

from __future__ import annotations

import os

from cachepipe.adapters.regular_file import open_regular
from cachepipe.domain.limits import LIMITS

FOLDER = "floors"


def seen_version(state_dir: str, name: str, channel: str) -> int:
    """Returns the highest version seen, 0 if none is known; never raises."""
    try:
        with os.fdopen(open_regular(path_of(state_dir, name, channel), follows_links=False), "rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            text = file.read(LIMITS.small_file_bytes).strip()
    except OSError:
        return 0
    return int(text) if owner in (0, os.geteuid()) and text.isdigit() and len(text) <= 10 else 0


def remember_version(state_dir: str, name: str, channel: str, version: int) -> None:
    """Writes a version down if it is higher than the one that is there; a folder that cannot be written keeps none."""
    if version <= seen_version(state_dir, name, channel):
        return
    if not os.path.isdir(os.path.dirname(os.path.abspath(state_dir))):
        return  # a cache root is made by who restores into it
    path = path_of(state_dir, name, channel)
    temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(b"%d\n" % version)
        os.replace(temporary, path)
    except OSError:
        return


def path_of(state_dir: str, name: str, channel: str) -> str:
    return os.path.join(state_dir, FOLDER, f"{name}@{channel}")
