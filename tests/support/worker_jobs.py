"""The builder's worker as a job of `tests.support.zygote`: the imports of torch, most of a small job's time, are made once."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping

import torch._inductor.compile_fx  # noqa: F401 - imported before the fork, so that no job pays for it

LIMIT_S = 300


def load_models() -> None:
    """There is nothing to read beside the imports."""


def work(job_file: str, log: str, environment: Mapping[str, str]) -> None:
    """Does what `python -m cachepipe.adapters.worker JOB_FILE` does in this environment; never returns.

    Nothing of cachepipe is imported before the fork: the worker's clock, hooks and patches begin in this process.
    """
    signal.alarm(LIMIT_S)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # torch asked for it, and TMPDIR is another one now
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = ["worker", job_file]
    runpy.run_module("cachepipe.adapters.worker", run_name="__main__", alter_sys=True)
