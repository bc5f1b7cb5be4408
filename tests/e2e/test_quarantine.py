"""Quarantine, with torch itself: a service that dies in its first calls after a restore gets one cold start, then another try."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.release import run_cachepipe
from tests.support.restoring import (
    Published,
    Ran,
    command,
    environment,
    publish_release,
    restore_words,
    run_restore,
    service_environment,
)

SERVICE = """
import ctypes, os, signal, sys, torch, cachepipe
cachepipe.attach()
how = sys.argv[1]
def backend(graph, inputs):  # within the first call: torch is compiling
    if how == "SIGKILL": os.kill(os.getpid(), signal.SIGKILL)
    if how == "SIGSEGV": ctypes.string_at(0)
    if how == "exception": raise RuntimeError("in the first call")
    return graph.forward
model = torch.compile(lambda x: x + 1, backend=backend)
model(torch.ones(2))
"""
SLOW = """
import sys, cachepipe
from cachepipe.runtime import attach
attach._begin_attempts(attach.attach())  # what the start of the first compile does
print("called", flush=True)
sys.stdin.readline()
cachepipe.ready()
print("ready", flush=True)
"""
ENDS = {"SIGKILL": -signal.SIGKILL, "SIGSEGV": -signal.SIGSEGV, "exception": 1}


@pytest.fixture
def demo(tmp_path: Path) -> Published:
    return publish_release(tmp_path)


def words(release: Published, tmp_path: Path) -> tuple[str, ...]:
    return (release.store.url, "--name", "demo", "--lock", release.lock, "--state-dir", str(tmp_path / "state"))


def start(release: Published, tmp_path: Path, how: str) -> Ran:
    return run_restore(tmp_path, *words(release, tmp_path), *command([sys.executable, "-c", SERVICE, how]))


@pytest.mark.parametrize("hows", [("SIGKILL", "SIGSEGV"), ("exception", "exception")], ids=" ".join)
def test_two_deaths_in_the_first_calls_give_one_cold_start_and_then_another_try(
    tmp_path: Path, demo: Published, hows: tuple[str, str]
) -> None:
    for how in hows:
        died = start(demo, tmp_path, how)
        assert died.code == ENDS[how], died.err
        assert died.line["outcome"] in ("restored", "present")
    state = ("--cache-root", os.path.dirname(demo.root), "--state-dir", str(tmp_path / "state"))
    told = run_cachepipe("doctor", "--name", "demo", *state, "--json", env=environment(tmp_path))
    assert told.returncode == 18, told.stderr
    (check,) = [row for row in json.loads(told.stdout)["checks"] if row["section"] == "quarantine"]
    assert (check["verdict"], check["value"].partition(" with ")[0]) == ("fail", "2 starts")
    cold = run_restore(tmp_path, *words(demo, tmp_path), *command())
    assert (cold.code, cold.line["outcome"]) == (0, "cold")
    assert f"2 starts with {demo.row.statement[:12]} within 15 minutes did not become ready" in cold.line["reason"]
    assert "CACHEPIPE_RESTORED" not in service_environment(cold)
    assert run_restore(tmp_path, *words(demo, tmp_path), *command(["true"])).line["outcome"] == "present"


def test_a_death_before_the_first_compile_is_not_the_caches(tmp_path: Path, demo: Published) -> None:
    dies = "import cachepipe, os, signal; cachepipe.attach(); os.kill(os.getpid(), signal.SIGKILL)"
    for _ in range(2):
        ran = run_restore(tmp_path, *words(demo, tmp_path), *command([sys.executable, "-c", dies]))
        assert ran.code == -signal.SIGKILL
    assert run_restore(tmp_path, *words(demo, tmp_path), *command(["true"])).line["outcome"] == "present"


def test_a_service_that_is_slow_to_become_ready_is_not_counted_while_it_lives(tmp_path: Path, demo: Published) -> None:
    argv = restore_words(*words(demo, tmp_path), *command([sys.executable, "-c", SLOW]))
    slow = [
        subprocess.Popen(
            argv, env=environment(tmp_path), cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for process in slow:
            assert process.stdout is not None
            assert process.stdout.readline() == "called\n"
        marks = list((tmp_path / "state/attempts" / demo.row.statement).iterdir())
        assert len(marks) == 2
        for mark in marks:  # ten minutes of warm-up behind them
            old = time.time() - 600
            os.utime(mark, (old, old))
        third = run_restore(tmp_path, *words(demo, tmp_path), *command(["true"]))
        assert third.line["outcome"] == "present"
        for process in slow:
            out, _ = process.communicate("\n", timeout=60)
            assert (process.returncode, out) == (0, "ready\n")
        assert list((tmp_path / "state/attempts" / demo.row.statement).iterdir()) == []
    finally:
        for process in slow:
            process.kill()
