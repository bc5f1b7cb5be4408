"""A publisher killed at any point leaves the last good version restorable, and the next run succeeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.errors import MissError
from cachepipe.failpoints import POINTS
from cachepipe.workflows.fetch import read_artifact, read_channel, read_file_table
from cachepipe.workflows.publish import publish
from tests.support.artifacts import NOW, make_artifact

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKER = REPOSITORY / "tests" / "support" / "invariants.py"
PUBLISH = """
import sys
from pathlib import Path
from cachepipe.adapters.local_store import LocalStore
from cachepipe.workflows.publish import publish
from tests.support.artifacts import NOW, make_artifact
publish(LocalStore(sys.argv[1]), "demo", "candidate", make_artifact(Path(sys.argv[2]), int(sys.argv[3])), NOW)
"""
PUBLISH_POINTS = [point for point in POINTS if point.startswith(("publish.", "store."))]
VISIBLE = ("publish.after_index", "publish.after_hint")
"""From here on the new version is current."""


def run_publisher(store: Path, folder: Path, number: int, point: str) -> int:
    folder.mkdir()
    variables = {**os.environ, "CACHEPIPE_FAILPOINT": point, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-c", PUBLISH, str(store), str(folder), str(number)], env=variables, check=False
    ).returncode


def checked(store: Path) -> dict[str, int]:
    """Returns the newest versions, by a program that knows the layout alone and never imports the code under test."""
    ran = subprocess.run([sys.executable, "-I", str(CHECKER), str(store)], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    newest: dict[str, int] = json.loads(ran.stdout)
    return newest


def restorable(store: LocalStore) -> str:
    (row,) = read_channel(store, "demo", "candidate", NOW).index.rows
    artifact = read_artifact(store, row, "demo")
    read_file_table(store, artifact.statement)
    return row.artifact


@pytest.mark.parametrize("point", PUBLISH_POINTS)
def test_a_kill_leaves_the_last_good_version_and_the_next_run_succeeds(tmp_path: Path, point: str) -> None:
    store = LocalStore(tmp_path / "store")
    good = publish(store, "demo", "candidate", make_artifact(tmp_path, 1), NOW)
    assert run_publisher(tmp_path / "store", tmp_path / "killed", 2, point) == -9
    assert checked(tmp_path / "store") == {"demo/candidate": 2 if point in VISIBLE else 1}
    assert (restorable(store) == good.artifact) == (point not in VISIBLE)
    assert run_publisher(tmp_path / "store", tmp_path / "again", 2, "") == 0
    after: dict[str, Any] = checked(tmp_path / "store")
    assert after["demo/candidate"] >= 2
    assert restorable(store) != good.artifact


@pytest.mark.parametrize("point", PUBLISH_POINTS)
def test_a_kill_of_the_first_publisher_leaves_a_store_that_can_be_published_to(tmp_path: Path, point: str) -> None:
    store = LocalStore(tmp_path / "store")
    assert run_publisher(tmp_path / "store", tmp_path / "killed", 1, point) == -9
    assert checked(tmp_path / "store") == ({"demo/candidate": 1} if point in VISIBLE else {})
    if point not in VISIBLE:
        with pytest.raises(MissError):
            read_channel(store, "demo", "candidate", NOW)
    publish(store, "demo", "candidate", make_artifact(tmp_path, 2), NOW)
    checked(tmp_path / "store")
    restorable(store)


def test_the_checker_sees_damage(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    row = publish(store, "demo", "candidate", make_artifact(tmp_path, 1), NOW)
    pack = next(key for key in store.list(f"v1/artifacts/{row.artifact}/packs/"))
    store.delete(pack)
    ran = subprocess.run([sys.executable, "-I", str(CHECKER), str(store.root)], check=False, capture_output=True)
    assert ran.returncode == 1
    assert b"missing or damaged" in ran.stdout
