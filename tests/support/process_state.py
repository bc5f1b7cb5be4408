"""What of this process a test could leave changed for the next one; torch's own is in `torch_state`."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys

SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM})
"""SIGALRM is the clock of tests with a limit."""
LIMITS = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_CPU", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC")


def state_of_process() -> dict[str, object]:
    os.umask(umask := os.umask(0))
    return {
        "collector": (gc.isenabled(), *gc.get_threshold()),
        "switch interval": sys.getswitchinterval(),
        "signals": {number: signal.getsignal(number) for number in SIGNALS},
        "umask": umask,
        "folder": os.getcwd(),
        "users": (*os.getresuid(), *os.getresgid()),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "standard streams": (sys.stdin, sys.stdout, sys.stderr),
    }
