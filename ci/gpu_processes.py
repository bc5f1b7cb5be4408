"""The processes that `ci/gpu` starts: each ends at its limit, and all of them when it is told to stop."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

GRACE_S = 60.0
"""A build that is interrupted puts its work away first."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Done(NamedTuple):
    code: int
    output: str
    talk: str
    """The end of what it said on stderr."""


class Later(Exception):
    """Not enough time is left in this invocation, or it was told to stop."""


class Outlasted(Exception):
    """A process did not end in its time, and was ended."""


class Busy(Exception):
    """Another invocation, or a process that one left behind, works in the folder."""


class Processes:
    """Runs processes for several threads, in one work folder."""

    def __init__(self) -> None:
        self._live: set[subprocess.Popen[str]] = set()
        self._change = threading.Lock()
        self._held: tuple[int, ...] = ()
        self.told: int | None = None
        """The signal that told us to stop; nothing is started any more."""

    @contextlib.contextmanager
    def alone_in(self, folder: Path) -> Iterator[None]:
        """Holds the work folder; so does every process that is started meanwhile, even one that a kill leaves behind."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "ci-gpu.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                where = f"{folder}: another ci/gpu works there, or what a killed one left behind"
                raise Busy(f"{where}: run again when it has ended, or name another folder by --work") from None
            self._held = (file.fileno(),)
            try:
                yield
            finally:
                self._held = ()

    def stop_at_signals(self) -> None:
        """Has a signal terminate what runs, a second one kill it; one that is ignored, as under nohup, stays so."""
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _frame: self._stop(number))

    def _stop(self, number: int) -> None:
        with self._change:
            what = signal.SIGTERM if self.told is None else signal.SIGKILL
            self.told = number
            for process in self._live:
                process.send_signal(what)

    def run(self, words: Sequence[str], env: Mapping[str, str], limit_s: float) -> Done:
        """Returns what a process said.

        Raises:
            Later: we were told to stop.
            Outlasted: it took longer than its limit, in seconds.
        """
        with tempfile.TemporaryFile("w+", errors="replace") as talk:
            process = self._start(words, env, talk)
            try:
                output, _ = process.communicate(timeout=max(limit_s, 0.0))
            except subprocess.TimeoutExpired:
                _end(process)
                raise Outlasted(f"not over in {limit_s:.0f} s") from None
            finally:
                with self._change:
                    self._live.discard(process)
            if self.told is not None:
                raise Later
            talk.seek(0)
            return Done(process.returncode, output, talk.read()[-4000:])

    def _start(self, words: Sequence[str], env: Mapping[str, str], talk: IO[str]) -> subprocess.Popen[str]:
        with self._change:
            if self.told is not None:
                raise Later
            process = subprocess.Popen(
                [*words],
                env=dict(env),
                stdout=subprocess.PIPE,
                stderr=talk,
                encoding="utf-8",
                errors="replace",
                pass_fds=self._held,
            )
            self._live.add(process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()  # not SIGINT, which what a script starts in the background ignores
    try:
        process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
