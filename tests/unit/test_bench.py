"""The benchmark's table: medians of fresh processes, and verdicts that can say no."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.support.release import REPOSITORY, clean_environment

RESULTS = sorted((REPOSITORY / "ci" / "results").glob("cpu-*.json"))


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("cachepipe_bench", str(REPOSITORY / "ci" / "bench"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


def measured(restored_s: float) -> dict[str, Any]:
    def runs(*seconds: float) -> list[dict[str, float]]:
        return [{"first_calls_s": s, "import_to_last_s": s + 2, "ready_s": s + 3} for s in seconds]

    cold = [{**run, "bundle_bytes": 10_000, "warm_bytes": 20_000} for run in runs(30, 20, 40)]
    times = ("hit, lock", "present, lock", "hit, channel", "present, channel", "kill switch", "python -c pass")
    statement = {
        "artifact": "01M8",
        "packs": [{"size_bytes": 900}],
        "table": {"size_bytes": 100},
        "unpacked_bytes": 5000,
        "tuned_bytes": 9000,
        "entries": [{"tuning": {"seconds": {"tune": 30.0, "settle": 5.0}}}],
    }
    return {
        "build": {"seconds": 60.0, "statement": statement},
        "runs": {
            "cold": cold,
            "torch warm folder": runs(2, 2, 2),
            "mega-cache bundle": runs(9, 9, 9),
            "restored": runs(restored_s, restored_s, 99),
            "restored, no g++": runs(restored_s, restored_s, 99),
            "eager": runs(1, 1, 1),
        },
        "restore": {name: [0.05, 0.05, 9.0] for name in times},
    }


def verdicts(bench: ModuleType, restored_s: float) -> dict[str, tuple[str, str]]:
    rows = bench.rows_of("demo", measured(restored_s))
    return {row.what.removeprefix("demo: "): (row.value, row.verdict) for row in rows}


def test_case_m5_medians_decide_and_one_slow_process_does_not(bench: ModuleType) -> None:
    found = verdicts(bench, 1.0)
    assert found["first calls, cold"] == ("30.00 s", "")
    assert found["first calls, restored"] == ("1.00 s", "met")
    assert found["cold ÷ restored"] == ("30.0 ×", "met")
    assert found["already present, lock"] == ("50 ms", "met")
    assert found["artifact"][0] == "01M8"


def test_a_missed_target_is_said(bench: ModuleType) -> None:
    found = verdicts(bench, 7.0)
    assert found["first calls, restored"][1] == "MISSED"
    assert found["cold ÷ restored"] == ("4.3 ×", "MISSED")
    assert found["import to last bucket, restored ÷ eager"][1] == "MISSED"


def test_help_says_what_is_measured() -> None:
    command = [sys.executable, str(REPOSITORY / "ci" / "bench"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environment())
    for word in ("cold", "mega-cache bundle", "restored, no g++", "page cache", "--quick", "--rounds"):
        assert word in done.stdout


def test_a_recorded_run_holds_three_processes_of_every_variant(bench: ModuleType) -> None:
    assert RESULTS, "no run is recorded in ci/results"
    for path in RESULTS:
        recorded = json.loads(path.read_text())
        assert recorded["machine"]["versions"]["torch"]
        assert recorded["date"]
        for subject in recorded["raw"].values():
            assert set(subject["runs"]) == set(bench.VARIANTS)
            assert all(len(runs) >= 3 for runs in subject["runs"].values())
