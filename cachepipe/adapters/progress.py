"""Progress of worker processes on stderr: bars on a terminal, else whole lines, at most one per 10 s.

A line that says that a step is finished, and every line of `say`, is printed at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from cachepipe.domain.printable import printable
from cachepipe.errors import Interrupted

INTERVAL_S = 10.0


class StepProgress(Protocol):
    """One worker process; `line` takes what it prints on stdout."""

    def line(self, text: str) -> None: ...


class Progress(Protocol):
    """Where a build or a verification says what it does."""

    def say(self, text: str) -> None:
        """Prints one line now."""

    def step(
        self, entry: str, step: str, shape_buckets: int, estimate_s: float
    ) -> AbstractContextManager[StepProgress]:
        """Shows one worker process; `estimate_s` is what it took last time, 0 if unknown."""


def open_progress(stream: TextIO = sys.stderr) -> Progress:
    """Returns bars if `stream` is a terminal that can show them, else lines."""
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return _Bars(stream)
    return Lines(stream, time.monotonic)


class _State:
    """What a worker told so far."""

    def __init__(self, shape_buckets: int) -> None:
        self.total = shape_buckets
        self.done = 0
        self.shape_bucket = ""

    def take(self, text: str) -> bool:
        """Returns whether the line was one of a worker's events."""
        try:
            event = json.loads(text)
        except ValueError:
            return False
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            return False
        self.shape_bucket = printable(str(event.get("shape_bucket", "")))
        if event["event"] == "bucket_done":
            self.done += 1
        return True


def step_line(entry: str, step: str, state: tuple[int, int, str], elapsed_s: float, estimate_s: float) -> str:
    """Returns `tune     bert/bfloat16/max-autotune  2/6  batch=8,seq=128  41 s of about 80 s`."""
    done, total, shape_bucket = state
    about = f" of about {estimate_s:.0f} s" if estimate_s > 0 else ""
    where = f"  {shape_bucket}" if shape_bucket else ""
    return f"{step:<9} {entry}  {done}/{total}{where}  {elapsed_s:.0f} s{about}"


@contextmanager
def _told(
    step: str, entry: str, begin: float, clock: Callable[[], float], say: Callable[[str], None]
) -> Iterator[None]:
    """Says how a step ended; an interrupt has its own line."""
    end = "failed"
    try:
        yield
        end = "done"
    except (Interrupted, KeyboardInterrupt):
        end = ""
        raise
    finally:
        if end:
            say(f"{step:<9} {entry}  {end}  {clock() - begin:.1f} s")


class Lines:
    """Whole lines for logs of CI systems."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._last = float("-inf")

    def say(self, text: str) -> None:
        self._stream.write(f"{printable(text)}\n")
        self._stream.flush()

    @contextmanager
    def step(self, entry: str, step: str, shape_buckets: int, estimate_s: float) -> Iterator[StepProgress]:
        begin, state = self._clock(), _State(shape_buckets)
        progress = self

        class Step:
            def line(self, text: str) -> None:
                now = progress._clock()
                if state.take(text) and now - progress._last >= INTERVAL_S:
                    progress._last = now
                    where = (state.done, state.total, state.shape_bucket)
                    progress.say(step_line(entry, step, where, now - begin, estimate_s))

        with _told(step, entry, begin, self._clock, self.say):
            yield Step()
        self._last = self._clock()


class _Bars:
    """One live bar for the running step; finished steps scroll up as lines."""

    def __init__(self, stream: TextIO) -> None:
        # rich costs 0.1 s and is of use on a terminal only
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)

    def say(self, text: str) -> None:
        self._console.print(printable(text), markup=False, soft_wrap=True)

    @contextmanager
    def step(self, entry: str, step: str, shape_buckets: int, estimate_s: float) -> Iterator[StepProgress]:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        about = f"of about {estimate_s:.0f} s" if estimate_s > 0 else ""
        columns = (
            TextColumn("{task.fields[step]:<9} {task.description}", markup=False),
            BarColumn(24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[shape_bucket]}", markup=False),
            TimeElapsedColumn(),
            TextColumn(about, markup=False),
        )
        begin, state = time.monotonic(), _State(shape_buckets)
        with RichProgress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(printable(entry), total=max(shape_buckets, 1), step=step, shape_bucket="")

            class Step:
                def line(self, text: str) -> None:
                    if state.take(text):
                        bars.update(task, completed=state.done, shape_bucket=state.shape_bucket)

            with _told(step, entry, begin, time.monotonic, self.say):
                yield Step()
