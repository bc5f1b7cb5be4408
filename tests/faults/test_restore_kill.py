"""Restores that are killed at every named point, and many at once: a complete folder or none, and the next run succeeds."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from cachepipe.workflows.restore import FAIL_POINTS
from tests.support.restoring import (
    PRINT_ENVIRONMENT,
    Published,
    command,
    environment,
    files_below,
    publish_release,
    restore_words,
    run_restore,
    service_environment,
)

POINTS = (*FAIL_POINTS, "restore.before_exec")


def check_folder(folder: str, allowed: list[Published]) -> None:
    """Fails unless the folder is absent, or complete with a marker; knows the layout only."""
    if not os.path.lexists(folder):
        return
    assert os.path.isfile(f"{folder}/.cachepipe/marker.json"), os.listdir(folder)
    assert files_below(folder) in [release.restored_bytes(folder) for release in allowed]


@pytest.mark.parametrize("point", POINTS)
def test_a_restore_that_is_killed_leaves_a_complete_folder_or_none(tmp_path: Path, point: str) -> None:
    demo = publish_release(tmp_path)
    words = (demo.store.url, "--name", "demo")
    env = environment(tmp_path, CACHEPIPE_FAILPOINT=point)
    killed = run_restore(tmp_path, *words, *command(), env=env)
    assert (killed.code, killed.out) == (-signal.SIGKILL, "")
    check_folder(demo.root, [demo])
    ran = run_restore(tmp_path, *words, *command())
    assert ran.line["outcome"] == ("present" if point in ("restore.after_swap", "restore.before_exec") else "restored")
    assert service_environment(ran)["CACHEPIPE_ROOT"] == demo.root
    check_folder(demo.root, [demo])


@pytest.mark.parametrize("point", POINTS)
def test_a_replacement_that_is_killed_leaves_the_old_folder_or_the_new_one(tmp_path: Path, point: str) -> None:
    old = publish_release(tmp_path)
    words = (old.store.url, "--name", "demo")
    run_restore(tmp_path, *words)
    new = publish_release(tmp_path, number=1)
    killed = run_restore(tmp_path, *words, *command(), env=environment(tmp_path, CACHEPIPE_FAILPOINT=point))
    assert killed.code == -signal.SIGKILL
    check_folder(old.root, [old, new])
    ran = run_restore(tmp_path, *words, *command())
    assert (ran.line["digest"], ran.line["folder"]) == (new.row.statement, new.root)
    check_folder(new.root, [new])


def test_a_half_written_folder_without_marker_is_never_used(tmp_path: Path) -> None:
    demo = publish_release(tmp_path)
    run_restore(
        tmp_path, demo.store.url, "--name", "demo", env=environment(tmp_path, CACHEPIPE_FAILPOINT="restore.pack")
    )
    env = environment(tmp_path, CACHEPIPE_FAILPOINT="restore.before_marker")
    run_restore(tmp_path, demo.store.url, "--name", "demo", env=env)
    (half,) = [path for path in (tmp_path / "cache").glob("demo.tmp.*") if (path / ".cachepipe").exists()]
    half.rename(demo.root)  # as if a crash had left it at its final name
    ran = run_restore(tmp_path, demo.store.url, "--name", "demo", *command())
    assert ran.line["outcome"] == "restored"
    check_folder(demo.root, [demo])


def test_a_replaced_folder_between_its_two_renames_is_made_anew(tmp_path: Path) -> None:
    demo = publish_release(tmp_path)
    run_restore(tmp_path, demo.store.url, "--name", "demo")
    os.rename(demo.root, f"{demo.root}.old.1234")  # killed between the renames: nothing at the final name
    assert run_restore(tmp_path, demo.store.url, "--name", "demo", *command()).line["outcome"] == "restored"
    check_folder(demo.root, [demo])


def test_of_many_restores_into_one_folder_one_writes_and_all_start(tmp_path: Path) -> None:
    demo = publish_release(tmp_path)
    env = environment(tmp_path)
    argv = restore_words(demo.store.url, "--name", "demo", "--", *PRINT_ENVIRONMENT)
    running = [
        subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)
    ]
    results = [process.communicate(timeout=60) for process in running]
    outcomes = sorted(err.split("outcome=")[1].split()[0] for _, err in results)
    assert outcomes == ["present"] * 5 + ["restored"]
    assert all(f'"CACHEPIPE_ROOT": "{demo.root}"' in out for out, _ in results)
    check_folder(demo.root, [demo])
    assert not list((tmp_path / "cache").glob("demo.*"))


def test_a_killed_restore_gives_its_lock_back(tmp_path: Path) -> None:
    demo = publish_release(tmp_path)
    run_restore(
        tmp_path, demo.store.url, "--name", "demo", env=environment(tmp_path, CACHEPIPE_FAILPOINT="restore.pack")
    )
    ran = run_restore(tmp_path, demo.store.url, "--name", "demo", "--deadline", "5", *command())
    assert ran.line["outcome"] == "restored"
    assert ran.seconds < 5
