"""A service's script as a job of `tests.support.zygote`: torch and what its compile stack imports of others are there already.

The compile stack itself is not: its import is what attaches cachepipe, in the service's own process.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping

import jinja2  # noqa: F401
import networkx  # noqa: F401
import sympy  # noqa: F401
import torch  # noqa: F401

LIMIT_S = 120


def load_models() -> None:
    """There is nothing to read beside the imports."""
    assert "torch._inductor" not in sys.modules


def serve(script: str, out: str, err: str, environment: Mapping[str, str]) -> None:
    """Runs a script as `python SCRIPT` does in its folder and this environment; never returns."""
    signal.alarm(LIMIT_S)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # torch may have asked for it
    os.chdir(os.path.dirname(script))
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    sys.argv = [script]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
