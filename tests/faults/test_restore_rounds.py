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
from tests.support import s3
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
Shop = Callable[[Published], tuple[str, dict[str, str]]]


def complete(folder: str, allowed: list[Published]) -> bool:
    """Returns whether the folder is there; fails if it is neither absent nor complete."""
    if not os.path.lexists(folder):
        return False
    assert os.path.isfile(f"{folder}/.cachepipe/marker.json"), os.listdir(folder)
    assert files_below(folder) in [release.restored_bytes(folder) for release in allowed]
    return True


@pytest.fixture
def shop(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Tells address and variables of the store that a release was published to, or of its copy on a real S3 server."""
    if kind == "local":
        return lambda release: (release.store.url, {})
    variables = s3.environment()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    address = s3.address(request.getfixturevalue("s3_server").endpoint)

    def copied(release: Published) -> tuple[str, dict[str, str]]:
        s3.copy_store(release.store, s3.opened(address))
        return address, variables

    return copied


@FULL
@pytest.mark.parametrize(("kind", "times"), [("local", 10), ("seaweedfs", 10)])
def test_restores_killed_at_every_point_are_finished_by_the_next(
    tmp_path: Path, kind: str, times: int, shop: Shop, record: Keep
) -> None:
    old = publish_release(tmp_path)
    lock = ("--lock", shutil.copy(old.lock, tmp_path / "old.lock"))  # the next release writes its own in its place
    new = publish_release(tmp_path, number=1)
    url, variables = shop(new)
    words, env = (url, "--name", "demo"), environment(tmp_path, **variables)
    kills = 0
    for number in range(times):
        for point in (*FAIL_POINTS, "restore.before_exec"):
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            if number % 2:  # every other time there is an older folder to be replaced
                assert run_restore(tmp_path, *words, *lock, env=env).line["outcome"] == "restored"
            ran = run_restore(tmp_path, *words, "--", "true", env={**env, "CACHEPIPE_FAILPOINT": point})
            assert ran.code == -signal.SIGKILL, point
            kills += 1
            complete(new.root, [old, new])
            again = run_restore(tmp_path, *words, "--", "true", env=env)
            assert (again.code, again.line["folder"]) == (0, new.root)
            assert complete(new.root, [new])
    record({"part": "kill restore", "store": kind, "kills": kills, "recovered": kills})


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("local", 4),
        ("seaweedfs", 4),
        pytest.param("local", 200, marks=FULL),
        pytest.param("seaweedfs", 200, marks=FULL),
    ],
)
def test_restores_killed_at_any_time_are_finished_by_the_next(
    tmp_path: Path, kind: str, kills: int, shop: Shop, record: Keep
) -> None:
    demo = publish_release(tmp_path)
    url, variables = shop(demo)
    words, env = (url, "--name", "demo", "--", "true"), environment(tmp_path, **variables)
    argv = restore_words(*words)
    chance = random.Random(11)
    counts = {"kills": 0, "too_late": 0, "recovered": 0}
    takes_s = 0.35
    while counts["kills"] < kills:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        with subprocess.Popen(argv, env=env, cwd="/", stderr=subprocess.DEVNULL) as process:
            time.sleep(chance.uniform(0.02, takes_s))
            process.kill()
        counts["kills" if process.returncode == -signal.SIGKILL else "too_late"] += 1
        complete(demo.root, [demo])
        again = run_restore(tmp_path, *words, env=env)
        assert again.code == 0 and again.line["outcome"] in ("restored", "present")
        takes_s = again.seconds if again.line["outcome"] == "restored" else takes_s
        assert complete(demo.root, [demo])
        counts["recovered"] += 1
    record({"part": "kill restore at random times", "store": kind, **counts})


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
