"""A child process that is asked and answers, one JSON object a line, and leaves no descendant behind."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

from cachepipe.adapters import guard
from cachepipe.adapters.children import Command, wait_for_end
from cachepipe.errors import DeadlineError


class Dialogue:
    """Runs a command while the body of `with` lasts; what it prints beside JSON objects with an `event` is passed over."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._pending = b""

    def __enter__(self) -> Dialogue:
        read, self._lifeline = os.pipe()
        with open(self._command.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(read), *self._command.argv],
                env=dict(self._command.env),
                cwd=self._command.cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(read,),
                start_new_session=True,
            )
        os.close(read)
        self._deadline = time.monotonic() + self._command.timeout_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        os.close(self._lifeline)
        wait_for_end(self._process)

    def ask(self, **wish: Any) -> None:
        """Sends one object.

        Raises:
            DeadlineError: the process is gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(wish).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise DeadlineError("the process ended before it answered") from error

    def answer(self, event: str) -> dict[str, Any]:
        """Returns the next object whose `event` is this one.

        Raises:
            DeadlineError: the process ended, or the command's time is over.
        """
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while True:
            line, separator, rest = self._pending.partition(b"\n")
            if separator:
                self._pending = rest
                found = _object(line)
                if found.get("event") == event:
                    return found
                continue
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise DeadlineError(f"no answer within {self._command.timeout_s:.0f} s")
            data = os.read(fd, 1 << 16)
            if not data:
                raise DeadlineError("the process ended before it answered")
            self._pending += data


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
