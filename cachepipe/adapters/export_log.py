"""Says in a worker's log where the time of an export goes, also when it is ended before it is done.

    export:    14.2 s: traced batch=8,seq=128
    export:    41.7 s: starts g++ /…/cdx….wrapper.cpp

Between two lines lies what the second one ended: torch lowers and tunes before it starts a compiler. What takes longer than
`STACK_S` leaves the stacks of all threads, again and again.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from typing import Any

STACK_S = 60.0
_STDERR = 2
_SOURCES = (".cpp", ".c", ".cu", ".o", ".ptx", ".S")


class ExportLog:
    """Lines on stderr while this is entered; an audit hook cannot be removed, so it is for a process of its own."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._is_on = False

    def __enter__(self) -> ExportLog:
        self._is_on = True
        sys.addaudithook(self._on_event)
        faulthandler.dump_traceback_later(STACK_S, repeat=True, file=_STDERR)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_on = False
        faulthandler.cancel_dump_traceback_later()

    def say(self, text: str) -> None:
        print(f"export: {time.perf_counter() - self._began:7.1f} s: {text}", file=sys.stderr, flush=True)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_on and event == "subprocess.Popen":
            given = arguments[1]
            words = [str(word) for word in given] if isinstance(given, (list, tuple)) else str(given).split()
            source = next((word for word in words[1:] if word.endswith(_SOURCES)), "")
            program = os.path.basename(words[0]) if words else "?"
            self.say(f"starts {program} {source}".rstrip())
