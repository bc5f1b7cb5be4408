"""The example service, restored in a fresh process under another HOME, user id and working folder, and asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_service import RunningService, running_service
from tests.support.release import REPOSITORY, Release, cachepipe_argv, clean_environment, run_cachepipe
from tests.support.users import as_other_user, can_switch, give_to_other_user

WORK = ("benchmarks", "tuning_runs", "triton_compiles", "native_builds")


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that another user id can reach (pytest's own is private), all of whose parents are safe in its eyes."""
    parent = None if can_switch() else REPOSITORY / ".work"
    if parent is not None:
        parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="cachepipe-service-", dir=parent))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def service(quickstart_release: Release, open_folder: Path) -> Iterator[RunningService]:
    release = quickstart_release
    promoted = run_cachepipe("promote", release.store, "--name", release.name, "--to", "service-test")
    assert promoted.returncode == 0, promoted.stderr
    for name in ("home", "dest", "cwd", "out"):
        (open_folder / name).mkdir(mode=0o700)
        give_to_other_user(open_folder / name)
    # neither USER nor a passwd entry, another HOME, nothing of the builder's environment
    env = clean_environment(HOME=str(open_folder / "home"), PYTHONPATH=os.pathsep.join(_checkout()))
    for name in ("USER", "LOGNAME", "XDG_CACHE_HOME"):
        env.pop(name, None)
    words = ["restore", release.store, "--name", release.name, "--channel", "service-test"]
    words += ["--dest", str(open_folder / "dest" / release.name), "--strict", "--"]
    prefix = as_other_user(cachepipe_argv(*words))
    with running_service(prefix, env, open_folder / "out", open_folder / "cwd") as running:
        running.statuses = running.wait_until_ready()
        yield running


def _checkout() -> list[str]:
    """Returns the folder to import cachepipe from when it is not installed."""
    import cachepipe

    folder = Path(str(cachepipe.__file__)).parent.parent
    return [] if folder.name == "site-packages" else [str(folder)]


def report(service: RunningService) -> dict[str, Any]:
    status, body = service.ask("/report")
    assert status == 200
    assert isinstance(body, dict)
    return body


@pytest.mark.slow
def test_case_d1_a_user_without_a_passwd_entry_gets_full_hits(service: RunningService) -> None:
    found = report(service)
    assert found["attached"]
    assert found["misses"] == found["bypasses"] == 0, json.dumps(found, indent=1)
    assert found["hits"] > 0
    assert {name: found[name] for name in WORK} == dict.fromkeys(WORK, 0)
    assert found["setting_differences"] == []


@pytest.mark.slow
def test_case_l2_one_line_at_restore_and_one_at_ready_share_the_start_id(service: RunningService) -> None:
    lines = service.log.read_text().splitlines()
    (restored,) = [line for line in lines if line.startswith("cachepipe restore")]
    (ready,) = [line for line in lines if line.startswith("cachepipe ready")]
    (begun,) = re.findall(r"\bstart=(\w+)", restored)
    assert f"start={begun}" in ready
    assert re.search(r"\bhits=[1-9]", ready) and "graphs=2" in ready and "expected_graphs=2" in ready
    assert not [line for line in lines if line.startswith(("cachepipe miss", "cachepipe setting"))]


@pytest.mark.slow
def test_the_service_answers_and_covered_shapes_compile_nothing(service: RunningService) -> None:
    for batch, seq in ((4, 64), (1, 32)):
        status, body = service.ask("/encode", {"batch": batch, "seq": seq, "seed": 7})
        assert status == 200
        assert len(body["vectors"]) == batch
        assert body["seconds"] < 2
    again = service.ask("/encode", {"batch": 1, "seq": 32, "seed": 7})[1]
    assert again["vectors"] == body["vectors"]
    assert report(service)["late_compiles"] == []


@pytest.mark.slow
def test_wrong_requests_do_not_hurt_it(service: RunningService) -> None:
    assert service.ask("/encode", {"batch": 0, "seq": 32, "seed": 7})[0] == 400
    assert service.ask("/encode", {"batch": 1})[0] == 400
    assert service.ask("/nothing")[0] == 404
    assert service.ask("/healthz") == (200, {"ready": True})


@pytest.mark.slow
def test_a_restored_answer_equals_that_of_a_service_without_any_artifact(
    service: RunningService, open_folder: Path
) -> None:
    folder = open_folder / "cold"
    folder.mkdir()
    env = clean_environment(
        HOME=str(folder), TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"), PYTHONPATH=os.pathsep.join(_checkout())
    )
    body = {"batch": 1, "seq": 32, "seed": 7}
    with running_service([], env, folder, folder) as cold:
        cold.wait_until_ready()
        assert cold.ask("/report")[1]["attached"] is False
        status, answer = cold.ask("/encode", body)
    assert status == 200
    restored = service.ask("/encode", body)[1]["vectors"]
    assert any(value for vector in restored for value in vector)
    assert answer["vectors"] == [pytest.approx(vector, abs=1e-3) for vector in restored]
