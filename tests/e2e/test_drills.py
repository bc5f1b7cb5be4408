"""The key drills of the README pass from beginning to end, and a drill whose step does not hold fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.release import REPOSITORY, clean_environment


def drill(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = {
        "CACHEPIPE": f"{sys.executable} -m cachepipe",
        "DRILL_BUILD": f"{sys.executable} -m tests.support.publish_small",
    }
    given = clean_environment(PYTHONPATH=str(REPOSITORY), **{**command, **env})
    return subprocess.run(
        ["bash", str(REPOSITORY / "ci/drill-keys"), *words], env=given, capture_output=True, text=True, check=False
    )


def test_rotation_and_revocation_do_what_the_readme_says() -> None:
    done = drill()
    assert done.returncode == 0, done.stderr
    titles = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert len(titles) == 10
    assert titles[-1] == "== all drills passed"
    refused = [line for line in done.stderr.splitlines() if "outcome=refused" in line]
    assert len(refused) == 7
    assert all("reason=" in line and "hint=" in line for line in refused)


def test_a_drill_whose_step_does_not_hold_fails(tmp_path: Path) -> None:
    lax = tmp_path / "lax"
    lax.write_text(f'#!/bin/sh\n[ "$1" = restore ] && exit 0\nexec {sys.executable} -m cachepipe "$@"\n')
    lax.chmod(0o755)
    done = drill("rotation", CACHEPIPE=str(lax))
    assert done.returncode == 1
    assert "drill failed: restore under 1.json: wanted exit code 14, found 0" in done.stderr
