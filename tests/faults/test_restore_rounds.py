"""Restores killed again and again, and eight at once into one folder: complete or absent, one writer, nothing half read."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cachepipe.workflows.restore import FAIL_POINTS
from tests.support.counting import Record
from tests.support.restoring import (
    Published,
    environment,
    files_below,
    publish_release,
    restore_words,
    run_restore,
)

FULL = pytest.mark.nightly
Keep = Callable[[Record], None]


def complete(folder: str, allowed: list[Published]) -> bool:
    """Returns whether the folder is there; fails if it is neither absent nor complete."""
    if not os.path.lexists(folder):
        return False
    assert os.path.isfile(f"{folder}/.cachepipe/marker.json"), os.listdir(folder)
    assert files_below(folder) in [release.restored_bytes(folder) for release in allowed]
    return True


@FULL
@pytest.mark.parametrize("times", [10])
def test_restores_killed_at_every_point_are_finished_by_the_next(tmp_path: Path, times: int, record: Keep) -> None:
    old = publish_release(tmp_path)
    lock = ("--lock", shutil.copy(old.lock, tmp_path / "old.lock"))  # the next release writes its own in its place
    new = publish_release(tmp_path, number=1)
    kills = 0
    for number in range(times):
        for point in (*FAIL_POINTS, "restore.before_exec"):
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            if number % 2:  # every other time there is an older folder to be replaced
                assert run_restore(tmp_path, old.store.url, "--name", "demo", *lock).line["outcome"] == "restored"
            env = environment(tmp_path, CACHEPIPE_FAILPOINT=point)
            ran = run_restore(tmp_path, new.store.url, "--name", "demo", "--", "true", env=env)
            assert ran.code == -signal.SIGKILL, point
            kills += 1
            complete(new.root, [old, new])
            again = run_restore(tmp_path, new.store.url, "--name", "demo", "--", "true")
            assert (again.code, again.line["folder"]) == (0, new.root)
            assert complete(new.root, [new])
    record({"part": "kill restore", "store": "local", "kills": kills, "recovered": kills})


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=FULL)])
def test_restores_killed_at_any_time_are_finished_by_the_next(tmp_path: Path, kills: int, record: Keep) -> None:
    demo = publish_release(tmp_path)
    argv = restore_words(demo.store.url, "--name", "demo", "--", "true")
    chance = random.Random(11)
    counts = {"kills": 0, "too_late": 0, "recovered": 0}
    while counts["kills"] < kills:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        with subprocess.Popen(argv, env=environment(tmp_path), cwd="/", stderr=subprocess.DEVNULL) as process:
            time.sleep(chance.uniform(0.02, 0.35))
            process.kill()
        counts["kills" if process.returncode == -signal.SIGKILL else "too_late"] += 1
        complete(demo.root, [demo])
        again = run_restore(tmp_path, demo.store.url, "--name", "demo", "--", "true")
        assert again.code == 0 and again.line["outcome"] in ("restored", "present")
        assert complete(demo.root, [demo])
        counts["recovered"] += 1
    record({"part": "kill restore at random times", "store": "local", **counts})


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=FULL)])
def test_of_eight_restorers_of_one_folder_one_writes_and_all_start(tmp_path: Path, rounds: int, record: Keep) -> None:
    demo = publish_release(tmp_path)
    argv = restore_words(demo.store.url, "--name", "demo", "--", "true")
    env = environment(tmp_path)
    written = started = 0
    for number in range(rounds):
        if number % 2:  # an older artifact is replaced under the eyes of all
            demo = publish_release(tmp_path, number=number)
        else:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        running = [
            subprocess.Popen(argv, env=env, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for _ in range(8)
        ]
        lines = [process.communicate(timeout=120)[1] for process in running]
        assert [process.returncode for process in running] == [0] * 8, lines
        outcomes = sorted(line.split("outcome=")[1].split()[0] for line in lines)
        assert outcomes == ["present"] * 7 + ["restored"], outcomes
        assert all(f"digest={demo.row.statement}" in line for line in lines)
        assert complete(demo.root, [demo])
        written, started = written + 1, started + 8
    leftovers = [name for name in os.listdir(tmp_path / "cache") if name.startswith("demo.tmp")]
    assert leftovers == [], "no half written sibling stays; replaced ones are removed later"
    record(
        {"part": "restorers", "store": "local", "rounds": rounds, "started": started, "writers": written, "partial": 0}
    )
