"""The standard streams of a start: there, and never a reason to wait.

Whoever starts a service may have closed stdin, stdout or stderr. The next file that is opened then gets the number 0, 1
or 2, and our one line would be written into a restored file. Or nobody reads a pipe, and a write never returns.
"""

from __future__ import annotations

import os
import select
import time

WAIT_S = 0.1
"""For a reader of a full pipe; with two tries at an empty folder below the 2 s that a start may take beyond its deadline."""


def occupy() -> None:
    """Puts something harmless at each standard stream that is closed; the command finds it closed again."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # the lowest free number is this one; not inheritable, as everything that Python opens
            try:
                os.open(os.devnull, os.O_RDWR)
            except OSError:
                os.open("/", os.O_RDONLY)


def write(number: int, text: str, wait_s: float = WAIT_S) -> None:
    """Writes a text to a stream as far as it takes it; never raises, never waits longer than `wait_s`.

    Args:
        number: 1 or 2.
        text: what UTF-8 cannot say is escaped.
        wait_s: the rest is dropped then.
    """
    data = text.encode(errors="backslashreplace")
    until = time.monotonic() + wait_s
    try:
        waiting = select.poll()
        waiting.register(number, select.POLLOUT)
        while data and waiting.poll(max(0.0, until - time.monotonic()) * 1000):
            # A pipe that can be written takes PIPE_BUF bytes, whole: lines of several ranks do not mix.
            data = data[os.write(number, data[: select.PIPE_BUF]) :]
    except (OSError, ValueError):
        return
