"""A built quickstart, and the ways to run cachepipe as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.steering import clean_environment

REPOSITORY = Path(__file__).resolve().parents[2]
MANIFEST = REPOSITORY / "manifests" / "quickstart.yaml"
SERVICE = REPOSITORY / "ci" / "examples" / "service.py"
BUILD_LIMIT_S = 540


@dataclass(frozen=True)
class Release:
    store: str
    name: str
    cache_root: str
    work: str
    evidence: str
    build: dict[str, Any]
    """What `build --json` printed."""
    build_log: str

    @property
    def root(self) -> str:
        return f"{self.cache_root}/{self.name}"


def cachepipe_argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "cachepipe", *words]


def run_cachepipe(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | str = "/", timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs one command line in a fresh process, from a folder that is not the checkout."""
    return subprocess.run(
        cachepipe_argv(*words),
        env=clean_environment() if env is None else dict(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def build_quickstart(folder: Path) -> Release:
    """Builds the quickstart below `folder`, into the channel candidate."""
    store, cache_root, work, evidence = (folder / name for name in ("store", "cache", "work", "evidence"))
    cache_root.mkdir(mode=0o700)
    words = ["--store", f"file://{store}", "--cache-root", str(cache_root), "--work", str(work)]
    done = run_cachepipe("build", str(MANIFEST), *words, "--report", str(evidence), "--json", timeout_s=BUILD_LIMIT_S)
    assert done.returncode == 0, f"build of the quickstart: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Release(
        f"file://{store}", "quickstart", str(cache_root), str(work), str(evidence), json.loads(done.stdout), done.stderr
    )
