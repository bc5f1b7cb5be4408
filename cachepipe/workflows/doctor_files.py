"""Whether the bytes of a restored folder are those that were restored: a start compares size, time and inode alone."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cachepipe.domain.checkup import FAIL, Check
from cachepipe.domain.limits import MIB
from cachepipe.domain.marker import MarkedFile, Marker

SHOWN = 3


def file_checks(folder: Path, marker: Marker) -> list[Check]:
    """Returns one check of all files of a folder against the digests of its marker."""
    name, count = f"files of {folder.name}", len(marker.files)
    changed = [row.path for row in marker.files if not _is_as_restored(folder, row)]
    if not changed:
        size = sum(row.size_bytes for row in marker.files)
        return [Check("folders", name, f"{count} files, {size} bytes, as they were restored")]
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    text = f"{len(changed)} of {count} are not as they were restored: {', '.join(changed[:SHOWN])}{more}"
    return [Check("folders", name, text, FAIL, f"stop its services and remove {folder}: the next start restores it")]


def _is_as_restored(folder: Path, row: MarkedFile) -> bool:
    digest = hashlib.sha256()
    try:
        handle = os.open(folder / row.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            while chunk := file.read(MIB):
                digest.update(chunk)
    except OSError:
        return False
    return digest.hexdigest() == row.sha256
