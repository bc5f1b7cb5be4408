"""Floors: where a node looks for the versions that it has seen, and where it leaves them before a folder is known."""

from __future__ import annotations

import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from threading import Barrier, Event

import pytest

from cachepipe.adapters import cachedir
from cachepipe.adapters.floors import Floor
from cachepipe.workflows import floors
from cachepipe.workflows.outcome import RestoreRequest
from cachepipe.workflows.restore_options import Options


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The default cache root, which is not there yet, and scratch space."""
    monkeypatch.setattr(cachedir, "DEFAULT_CACHE_ROOT", str(tmp_path / "root"))
    return tmp_path / "root", tmp_path / "scratch/cachepipe"


def request_of(scratch: Path, store: str = "s3://one/p", **options: object) -> RestoreRequest:
    given = Options(store=store, names=("demo",), **options)  # type: ignore[arg-type]
    return RestoreRequest(
        given, {"XDG_CACHE_HOME": str(scratch.parent)}, datetime.now(timezone.utc), deadline=0.0, start_id="x"
    )


def kept(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("demo@*"))


def test_the_default_cache_root_is_used_where_it_is_there_and_private(homes: tuple[Path, Path]) -> None:
    root, scratch = homes
    root.mkdir(mode=0o700)
    request = request_of(scratch)
    floors.remember(request, "demo", 3)
    assert len(kept(root)) == 1 and not scratch.exists()
    assert floors.seen_version(request, "demo", str(root / "demo")) == 3


@pytest.mark.parametrize("obstacle", ["no cache root yet", "a state folder that is none"])
def test_a_version_is_found_again_wherever_the_start_that_saw_it_could_write(
    homes: tuple[Path, Path], obstacle: str
) -> None:
    root, scratch = homes
    request = request_of(scratch)
    if obstacle != "no cache root yet":
        root.mkdir(mode=0o700)
    if obstacle == "a state folder that is none":
        (root / ".state").write_text("")
    floors.remember(request, "demo", 3)
    assert (kept(root) if root.exists() else [], len(kept(scratch))) == ([], 1)
    root.mkdir(mode=0o700, exist_ok=True)
    assert floors.seen_version(request, "demo", "") == 3
    assert floors.seen_version(request, "demo", str(root / "demo")) == 3
    if obstacle == "a state folder that is none":
        (root / ".state").unlink()
    floors.remember(request, "demo", 2)
    assert floors.seen_version(request, "demo", "") == 3, "the highest counts, wherever it lies"


def test_a_folder_of_the_user_that_hangs_delays_no_start_that_has_its_cache_root(
    homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, scratch = homes
    root.mkdir(mode=0o700)
    request, over = request_of(scratch), Event()
    floors.remember(request, "demo", 3)
    real = cachedir.check_private

    def hang(folder: str, *, closes: bool = True) -> None:
        if folder == str(scratch):
            assert over.wait(60)
        real(folder, closes=closes)

    monkeypatch.setattr(cachedir, "check_private", hang)
    try:
        began = time.monotonic()
        assert floors.seen_version(request, "demo", "") == 3
        assert time.monotonic() - began < 10, "the answer came while the mount was silent"
    finally:
        over.set()


@pytest.mark.parametrize("state", ["absent", "open to others"])
def test_else_scratch_space_is(homes: tuple[Path, Path], state: str) -> None:
    root, scratch = homes
    if state != "absent":
        root.mkdir()
        root.chmod(0o777)
    request = request_of(scratch)
    floors.remember(request, "demo", 3)
    assert (kept(root), len(kept(scratch))) == ([], 1), "no cache root is made, and no open one believed"
    assert floors.seen_version(request, "demo", "") == 3


def test_an_older_version_lowers_no_floor(homes: tuple[Path, Path]) -> None:
    request = request_of(homes[1])
    for version in (3, 2):
        floors.remember(request, "demo", version)
    assert floors.seen_version(request, "demo", "") == 3


def test_starts_that_remember_at_once_never_lower_a_floor(tmp_path: Path) -> None:
    versions, floor = range(1, 9), Floor(str(tmp_path), "demo", "stable")
    together = Barrier(len(versions))
    for _ in range(20):
        with ThreadPoolExecutor(len(versions)) as pool:
            assert all(pool.map(lambda version: together.wait(60) >= 0 and floor.remember(version), versions))
        assert floor.seen() == versions[-1]
        Path(floor.path).unlink()
    assert os.listdir(tmp_path / "floors") == []


def test_a_start_that_was_stopped_while_it_remembered_keeps_no_other_from_it(tmp_path: Path) -> None:
    (tmp_path / "floors").mkdir()
    handle = os.open(tmp_path / "floors", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    floor = Floor(str(tmp_path), "demo", "stable")
    assert (floor.remember(3), floor.seen()) == (True, 3)
    os.close(handle)


def test_without_a_folder_another_store_and_another_channel_have_other_floors(homes: tuple[Path, Path]) -> None:
    floors.remember(request_of(homes[1]), "demo", 3)
    assert floors.seen_version(request_of(homes[1], "s3://two/p"), "demo", "") == 0
    assert floors.seen_version(request_of(homes[1], channel="canary"), "demo", "") == 0
    assert floors.seen_version(request_of(homes[1]), "other", "") == 0


def test_beside_a_folder_a_floor_is_that_of_every_store(homes: tuple[Path, Path]) -> None:
    root, scratch = homes
    root.mkdir(mode=0o700)
    floors.remember(request_of(scratch), "demo", 3, str(root / "demo"))
    assert kept(root) == [".state/floors/demo@stable"]
    assert floors.seen_version(request_of(scratch, "s3://two/p"), "demo", str(root / "demo")) == 3


@pytest.mark.parametrize("option", ["dest", "state_dir"])
def test_a_place_that_the_options_name_is_the_only_one(homes: tuple[Path, Path], tmp_path: Path, option: str) -> None:
    request = request_of(homes[1], **{option: str(tmp_path / "own/deep")})
    floors.remember(request, "demo", 3)
    assert not homes[0].exists() and not homes[1].exists()
    # the folder above a state folder is made; that above a release's folder is who restores there
    assert (floors.seen_version(request, "demo", ""), (tmp_path / "own").exists()) == (
        (3, True) if option == "state_dir" else (0, False)
    )


def test_where_nothing_can_be_written_a_start_goes_on(homes: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    request = request_of(homes[1], state_dir=str(tmp_path / "file/state"))
    floors.remember(request, "demo", 3)
    assert floors.seen_version(request, "demo", "") == 0
