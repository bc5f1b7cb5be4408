"""The recorder is fed, asked, started and stopped from many threads: a scrape beside a compile, `ready()` beside another."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from cachepipe.adapters.torch_trace import TRACE_LOGGER
from cachepipe.domain.evidence import Work
from cachepipe.runtime.childwork import VARIABLE, ChildSink
from cachepipe.runtime.recorder import BucketLog, Recorder

LIMIT_S = 0.3
"""That a thread waits for another to come where it must not: by then it would have come."""


def side_by_side(*deeds: Callable[[], object]) -> None:
    """Runs each deed in a thread of its own; what one raises is raised."""
    errors: list[BaseException] = []

    def run(deed: Callable[[], object]) -> None:
        begin.wait()
        try:
            deed()
        except BaseException as error:
            errors.append(error)

    begin = threading.Barrier(len(deeds))
    threads = [threading.Thread(target=run, args=(deed,)) for deed in deeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_work_of_children_is_counted_once_where_two_ask_for_it_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made, both = Recorder(), threading.Barrier(2)
    read = os.pread

    def read_together(*args: int) -> bytes:
        data = read(*args)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(LIMIT_S)
        return data

    made.start()
    for _ in range(5):
        ChildSink(os.environ[VARIABLE]).on_work("benchmarks", "kernel")
    monkeypatch.setattr("cachepipe.runtime.childwork.os.pread", read_together)
    side_by_side(made.work, made.work)
    ChildSink(os.environ[VARIABLE]).on_work("benchmarks", "a later one")
    assert made.work() == Work(benchmarks=6)
    assert [(item.what, item.count) for item in made.work_items()] == [("a later one", 1), ("kernel", 5)]
    made.stop()


def test_a_new_shape_bucket_does_not_disturb_who_asks_for_the_work() -> None:
    made, has_begun, has_called = Recorder(), threading.Event(), threading.Event()

    class Logs(dict[str, BucketLog]):
        """A call of a new shape bucket comes while they are added up."""

        def values(self) -> Iterator[BucketLog]:  # type: ignore[override]
            for log in super().values():
                has_begun.set()
                has_called.wait(LIMIT_S)
                yield log

    def call() -> None:
        has_begun.wait()
        with made.shape_bucket("batch=2"):
            made.on_work("benchmarks", "kernel")
        has_called.set()

    made.on_work("benchmarks", "kernel")
    made.logs = Logs(made.logs)
    side_by_side(made.work, call)
    assert made.work() == Work(benchmarks=2)


def test_a_recorder_that_stops_beside_a_compile_that_begins_leaves_no_handler_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, has_begun, has_stopped = Recorder(), threading.Event(), threading.Event()
    hear = made._trace.hear

    def hear_late() -> None:
        has_begun.set()
        has_stopped.wait(LIMIT_S)
        hear()

    def stop() -> None:
        has_begun.wait()
        made.stop()
        has_stopped.set()

    made.start()
    monkeypatch.setattr(made._trace, "hear", hear_late)
    logger = logging.getLogger(TRACE_LOGGER)
    try:
        side_by_side(made.hear, stop)
        assert made._trace not in logger.handlers
    finally:
        logger.removeHandler(made._trace)


@pytest.mark.parametrize("deeds", [("hear", "hear"), ("start", "hear"), ("start", "start")])
def test_compiles_that_begin_at_a_time_are_heard_once_each(monkeypatch: pytest.MonkeyPatch, deeds: tuple[str]) -> None:
    both = threading.Barrier(2)

    class Handlers(list[logging.Handler]):
        """Both look before either adds itself."""

        def __contains__(self, handler: object) -> bool:
            is_there = super().__contains__(handler)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(LIMIT_S)
            return is_there

    logger, made = logging.getLogger(TRACE_LOGGER), Recorder()
    if "start" not in deeds:
        made.start()
        logger.removeHandler(made._trace)  # as a service's own logging may
    monkeypatch.setattr(logger, "handlers", Handlers(logger.handlers))
    side_by_side(*(getattr(made, deed) for deed in deeds))
    assert logger.handlers.count(made._trace) == 1
    made.stop()
    assert logger.handlers.count(made._trace) == 0


def test_the_child_of_a_fork_waits_for_no_thread_that_it_does_not_have() -> None:
    made = Recorder()
    made.start()

    def hold() -> None:
        with made._switching, made._lock:
            is_held.set()
            may_end.wait()

    is_held, may_end = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        made.after_fork()
        made.hear()
        made.stop()
        os._exit(0 if made.work() == Work() else 1)
    may_end.set()
    thread.join()
    made.stop()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
