"""Why a job failed, in words; `false` stands before the worker, so none is started."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cachepipe.adapters.execute import NOT_HELD
from cachepipe.adapters.folders import MIN_FREE_BYTES
from cachepipe.adapters.progress import Lines
from cachepipe.adapters.workdir import Binding, BuildRoot, WorkDir
from cachepipe.domain.evidence import EntryEvidence, GraphEvidence, Lookup, Work, WorkItem
from cachepipe.domain.phases import Phases
from cachepipe.domain.remedies import remedy
from cachepipe.errors import BuildError, NoRoomError
from cachepipe.workflows.jobs import HEADER, Shop, failure, run_job
from tests.support.artifacts import entry_spec


def run(tmp_path: Path, *before: str) -> tuple[EntryEvidence | None, str]:
    stream, spec = io.StringIO(), entry_spec()
    work = WorkDir(tmp_path / "work")
    shop = Shop(work, BuildRoot(tmp_path / "root"), (), Lines(stream, lambda: 0.0))
    entry = work.entry(Binding("a" * 64, "f", "/r"))
    job = shop.job("tune", spec, entry.pending("tune"))
    try:
        return run_job(shop, job, "tune", entry, {"PATH": "/usr/bin:/bin"}, before), ""
    except BuildError as error:
        assert error.step == "tune" and error.entry == spec.id
        return None, f"{stream.getvalue()}{error}"


def test_a_worker_that_leaves_no_result_is_failed_and_never_done(tmp_path: Path) -> None:
    _, words = run(tmp_path, "false")
    assert "failed" in words and "done" not in words and "left no result" in words


def test_a_worker_that_exits_with_0_and_leaves_no_result_has_failed(tmp_path: Path) -> None:
    _, words = run(tmp_path, "true")
    assert "failed" in words and "exit code 0 and left no result" in words


def test_a_worker_that_dies_on_a_full_disk_is_no_riddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=MIN_FREE_BYTES - 1))
    with pytest.raises(NoRoomError, match="bytes are free"):
        run(tmp_path, "false")


def evidence(error: str, traceback: str, *lookups: Lookup) -> EntryEvidence:
    return EntryEvidence(
        *("mlp/float32/default", "prove", "2.13.0", (), lookups, Work(), (), 0.0, 0.0, 0.0, {}),
        error=error,
        error_kind=error.partition(":")[0],
        traceback=traceback,
    )


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            '[\n "0/7: self.calls == 7  # in forward\\nUser stack trace:\\n  File", "0/6: self.cal',
            "0/7: self.calls == 7 # in forward",
        ),
        ('["0/1: flag is True"]', "0/1: flag is True"),
        ("in plain words", "in plain words"),
        ("", "not told"),
    ],
)
def test_case_f1_the_recompile_limit_is_told_by_the_newest_guard_alone(tmp_path: Path, reason: str, words: str) -> None:
    graph = GraphEvidence("0/7", "batch=8", "", {}, Phases(), recompile_reason=reason)
    found = replace(evidence("FailOnRecompileLimitHit: Hard failure", ""), graphs=(graph,))
    told = failure(found, 1, tmp_path / "log")
    assert told == f"torch's recompile limit is hit: 1 traces so far; the guard that failed last: {words}"


def test_an_error_of_the_worker_itself_is_told_without_its_frames(tmp_path: Path) -> None:
    error = "UsageError: `torch._dynamo.config.suppress_errors` is on: a failed compile would run eager unseen"
    words = failure(evidence(error, f"Traceback:\n  File w.py\ncachepipe.errors.{error}\n"), 1, tmp_path / "log")
    assert words == error.removeprefix("UsageError: ")


def test_a_refused_compiler_is_told_by_the_lookups_that_missed_not_by_its_command_line(tmp_path: Path) -> None:
    missed = Lookup("batch=8", "0/1", "aotautograd", "miss", "a1", "full_miss")
    error = f"CppCompileError: C++ compile error\n{NOT_HELD}: g++ {'-O3 ' * 900}"
    words = failure(evidence(error, error, missed, Lookup("", "", "native", "miss", "c1")), 1, tmp_path / "log")
    assert "aotautograd of graph 0/1 (full_miss)" in words
    assert "g++" not in words and "\n" not in words


def test_a_header_that_torch_looks_for_with_the_compiler_is_told_with_the_option_that_ends_it(tmp_path: Path) -> None:
    item = WorkItem("native_builds", HEADER, "0/0", "batch=8", 2)
    lookup = Lookup("batch=8", "0/0", "aotautograd", "bypass", "", "C++ compile error")
    error = f"BackendCompilerFailed: CppCompileError: C++ compile error\n{NOT_HELD}: g++ header.hpp -E"
    words = failure(replace(evidence(error, error, lookup), work_items=(item,)), 1, tmp_path / "log")
    assert words.endswith("what this call looks up: a precompiled header")
    assert "cpp_cache_precompile_headers: false" in (remedy([words]) or "")


def test_an_error_is_quoted_once_with_the_last_frames_before_it(tmp_path: Path) -> None:
    error = "ValueError: a\nb"
    frames = f'Traceback:\n  File "m.py", line 3, in forward\nmodels.own.{error}\n'
    words = failure(evidence(error, frames), 1, tmp_path / "log")
    assert "models.own" not in words
    assert words.count("ValueError") == 1 and words.startswith(error)
    assert 'File "m.py", line 3' in words
    assert max(map(len, failure(evidence("x" * 4000, ""), 1, tmp_path / "log").splitlines())) == 500
