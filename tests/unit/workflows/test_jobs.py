"""Why a job failed, in words; `false` stands before the worker, so none is started."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from cachepipe.adapters.folders import MIN_FREE_BYTES
from cachepipe.adapters.progress import Lines
from cachepipe.adapters.workdir import Binding, BuildRoot, WorkDir
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.errors import BuildError, NoRoomError
from cachepipe.workflows.jobs import Shop, run_job
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
