"""`ci/nightly` leaves no nightly test out, runs none twice, and skips what it has done."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.release import REPOSITORY

MARK = "mark." + "nightly"


@pytest.fixture
def nightly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("nightly", str(REPOSITORY / "ci" / "nightly"))
    spec = importlib.util.spec_from_loader("nightly", loader)
    assert spec is not None
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "nightly.json")
    return module


def test_every_nightly_test_belongs_to_one_part(nightly: ModuleType) -> None:
    named = [word for words in nightly.PARTS.values() for word in words]
    files = sorted({word.partition("::")[0] for word in named})
    marked = [
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        if MARK in path.read_text()
    ]
    assert sorted(marked) == files
    collect = ["--collect-only", "-q", "-m", "nightly", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *collect], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(tests) > 10, done.stdout + done.stderr
    for test in tests:
        parts = [word for word in named if test == word or test.startswith((f"{word}::", f"{word}["))]
        assert len(parts) == 1, test
    for word in named:
        assert any(test.startswith(word) for test in tests), f"nothing is run by {word}"


def test_a_part_that_was_run_on_these_sources_is_skipped_and_a_failed_one_is_not(
    nightly: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run_part(part: str) -> dict[str, object] | None:
        ran.append(part)
        rows = [{"part": part, "store": "local", "kills": 3}]
        return None if part == "gc-moto" else {"counts": rows, "seconds": 1.0, "date": "2026-11-30"}

    monkeypatch.setattr(nightly, "run_part", run_part)
    monkeypatch.setattr(nightly, "VENV_PYTHON", Path("/nonexistent"))
    monkeypatch.setattr(nightly, "sources_digest", lambda: "a")
    monkeypatch.setattr(sys, "argv", ["nightly", "gc-local", "gc-moto"])
    assert nightly.main() == 1
    assert nightly.main() == 1
    assert ran == ["gc-local", "gc-moto", "gc-moto"]
    out, err = capsys.readouterr()
    assert "gc-local: done on 2026-11-30: gc-local on local: kills 3" in out and "failed: gc-moto" in err
    monkeypatch.setattr(nightly, "sources_digest", lambda: "b")
    monkeypatch.setattr(sys, "argv", ["nightly", "gc-local"])
    assert nightly.main() == 0
    assert ran[-1] == "gc-local" and len(ran) == 4
