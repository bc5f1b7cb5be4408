"""Who built an artifact, for the statement."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from cachepipe import __version__
from cachepipe.domain.record import sha256

_GIT_LIMIT_S = 20


def provenance(manifest: Path) -> dict[str, str]:
    """Returns cachepipe's version, a digest of the host's name, the manifest's digest, and the source commit if known."""
    facts = {
        "cachepipe": __version__,
        "host": sha256(socket.gethostname().encode())[:16],
        "manifest": sha256(manifest.read_bytes()),
    }
    folder = manifest.absolute().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit:
        facts["commit"] = commit
        facts["is_dirty"] = "yes" if _git(folder, "status", "--porcelain", "-uno") else "no"
    return facts


def _git(folder: Path, *words: str) -> str:
    try:
        ran = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, timeout=_GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.decode(errors="replace").strip()
