"""Scripts of services that attach by the `.pth` file: each one a process, fresh or forked from one that has imported torch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from cachepipe.domain.variables import cache_variables
from tests.support.jobs import MODELS
from tests.support.zygote import Zygote

SERVICE = """
import os, sys
sys.path.insert(0, {models!r})
import torch, cachepipe
import case_models
model = torch.compile(case_models.mm_product().eval().requires_grad_(False), dynamic=False)
def serve():
    with torch.inference_mode():
        model(torch.ones(4, 8))
{body}
"""
DIGEST = "d" * 64
LIMIT_S = 120


def _prepared(tmp_path: Path, code: str, variables: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Returns the path of the script, and the environment of a start that was restored."""
    script = tmp_path / "service.py"
    script.write_text(code)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "CACHEPIPE_ATTACH": "1",
        "CACHEPIPE_START_ID": "start1",
        "CACHEPIPE_STATE_DIR": str(tmp_path / "state"),
        "CACHEPIPE_RESTORED": DIGEST,
        **cache_variables(str(tmp_path / "root")),
        **variables,
    }
    return str(script), environment


def run(tmp_path: Path, body: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the service in a fresh process, whose command line begins with `words`."""
    script, environment = _prepared(tmp_path, SERVICE.format(models=str(MODELS), body=body), variables)
    command = [*(words or (sys.executable,)), script]
    return subprocess.run(
        command, env=environment, capture_output=True, check=False, text=True, timeout=LIMIT_S, cwd=tmp_path
    )


def forked(tmp_path: Path, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the service in a fork, which imports torch's compile stack and attaches as a fresh process does: for what it tells later."""
    script, environment = _prepared(tmp_path, SERVICE.format(models=str(MODELS), body=body), variables)
    out, err = tmp_path / "service.out", tmp_path / "service.err"
    code = _zygote().run("serve", script, str(out), str(err), environment)
    return subprocess.CompletedProcess([script], code, out.read_text(), err.read_text())


@functools.cache
def _zygote() -> Zygote:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return Zygote({"CACHEPIPE_ATTACH": "1"}, "service_jobs", kept)


def ready_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("cachepipe ready")]
