"""Work of child processes comes home through a log in memory, and never lands in another file of the parent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachepipe.runtime import childwork
from cachepipe.runtime.childwork import VARIABLE, ChildSink, ChildWork
from tests.support import child_work
from tests.support.release import REPOSITORY


@pytest.fixture
def log() -> Iterator[ChildWork]:
    made = ChildWork()
    made.open()
    yield made
    made.close()
    os.close(made._fd)


def test_what_a_child_writes_is_taken_once_in_whole_lines(log: ChildWork) -> None:
    sink = ChildSink(os.environ[VARIABLE])
    sink.on_work("triton_compiles", "triton_poi_0")
    sink.on_work("benchmarks", "a name\nof two lines")
    assert log.take() == [("triton_compiles", "triton_poi_0"), ("benchmarks", "a name of two lines")]
    with open(os.environ[VARIABLE], "ab", buffering=0) as file:
        file.write(b"native_builds half")
        assert log.take() == []
        file.write(b" done.so\nunknown_field x\n")
    assert log.take() == [("native_builds", "half done.so")]


def test_the_log_is_bounded(log: ChildWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(childwork, "MAX_BYTES", 50)
    sink = ChildSink(os.environ[VARIABLE])
    for _ in range(100):
        sink.on_work("benchmarks", "k" * 10)
    assert os.fstat(log._fd).st_size < 100


def test_a_number_that_became_another_file_of_the_parent_is_never_written(tmp_path: Path) -> None:
    victim = tmp_path / "service.log"
    victim.write_text("precious\n")
    with victim.open("a") as file:
        ChildSink(f"/proc/{os.getpid()}/fd/{file.fileno()}").on_work("benchmarks", "x")
    ChildSink(str(victim)).on_work("benchmarks", "x")
    ChildSink("/proc/1/fd/99999").on_work("benchmarks", "x")
    assert victim.read_text() == "precious\n"


def test_a_fork_takes_nothing_of_its_parents(log: ChildWork) -> None:
    ChildSink(os.environ[VARIABLE]).on_work("benchmarks", "x")
    child = os.fork()
    if child == 0:
        os._exit(0 if log.take() == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert log.take() == [("benchmarks", "x")]


def test_closing_hides_the_log_from_later_children_and_keeps_it_for_those_that_know_it(log: ChildWork) -> None:
    path = os.environ[VARIABLE]
    log.close()
    assert VARIABLE not in os.environ
    ChildSink(path).on_work("benchmarks", "late")
    assert log.take() == [("benchmarks", "late")]
    log.open()
    assert os.environ[VARIABLE] == path


def test_torchs_own_compile_and_tuning_processes_count_for_the_process_that_started_them(
    log: ChildWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.autotune_process import TuningProcess
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    pool = SubprocPool(1)
    assert pool.submit(child_work.build, str(tmp_path)).result(timeout=400) == "built"
    pool.shutdown()
    tuning = TuningProcess(None)
    tuning.put(child_work.benchmark)
    assert tuning.get(timeout=400) == "benchmarked"
    tuning.shutdown()
    assert log.take() == [("native_builds", "kernel.so"), ("benchmarks", "")]
