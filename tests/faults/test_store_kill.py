"""kill -9 at every named point of gc, copy, promote and publish, and at any other time: the last good version stays restorable,
and running the command again finishes its work."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.domain.index import IndexRow
from cachepipe.failpoints import POINTS
from cachepipe.workflows import collect, mirror
from cachepipe.workflows.collect import gc
from cachepipe.workflows.fetch import newest, read_artifact, read_file_table
from cachepipe.workflows.fsck import fsck
from tests.support import authority
from tests.support.aging import age
from tests.support.artifacts import NOW
from tests.support.counting import Record
from tests.support.invariants import check
from tests.support.store_jobs import publish
from tests.support.zygote import Zygote

FULL = pytest.mark.nightly
ONCE_OR_TEN_TIMES = [1, pytest.param(10, marks=FULL)]
PUBLISH_POINTS = tuple(point for point in POINTS if point.startswith(("publish.", "store.")))
Keep = Callable[[Record], None]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.close()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with thirteen releases of fifty days ago in the channel candidate: gc may remove the first three."""
    folder = tmp_path_factory.mktemp("old")
    url = f"file://{folder}/store"
    for number in range(1, 14):
        publish(url, str(folder / "work"), number)
    age(LocalStore(folder / "store", authority.shared()), "v1/", 50)
    return folder / "store"


def fresh(old: Path, place: Path) -> LocalStore:
    """Returns a copy of the store, ages included."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(old, place)
    return LocalStore(place, authority.shared())


def killed(zygote: Zygote, point: str, job: str, *arguments: object) -> bool:
    """Runs a job that is killed at a point; False: it never came there, and must have succeeded."""
    code = zygote.run(job, *arguments, environment={"CACHEPIPE_FAILPOINT": point})
    assert code in (-signal.SIGKILL, 0), f"{job} at {point}: exit code {code}"
    return code != 0


def sound(store: LocalStore) -> dict[str, int]:
    """Fails if a promise is broken, by the checker that knows the layout alone; returns the newest versions."""
    versions, problems = check(Path(store.root), is_collected=True)
    assert problems == []
    return versions


def current(store: LocalStore, channel: str = "candidate") -> IndexRow:
    """Returns the one row that a restore would take, after reading what it would read."""
    found = newest(store, "demo", channel)
    assert found is not None
    (row,) = found.index.rows
    read_file_table(store, read_artifact(store, row, "demo").statement)
    return row


# --- gc -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", ONCE_OR_TEN_TIMES)
def test_gc_killed_at_any_point_is_finished_by_the_next_run(
    zygote: Zygote, old: Path, tmp_path: Path, times: int, record: Keep
) -> None:
    wanted = fresh(old, tmp_path / "wanted")
    gc(wanted, deletes=True)
    kills = 0
    for point in (*collect.FAIL_POINTS, "store.after_link") * times:
        store = fresh(old, tmp_path / "store")
        row = current(store)
        assert killed(zygote, point, "gc", store.url)
        kills += 1
        assert sound(store) == {"demo/candidate": 13} and current(store) == row
        assert zygote.run("gc", store.url) == 0
        left = [key for key in store.list("") if not key.startswith("v1/tombs/")]
        assert left == list(wanted.list("")), point
        assert zygote.run("publish", store.url, str(tmp_path / "work"), 50) == 0
        age(store, "v1/tombs/", 1)
        assert zygote.run("gc", store.url) == 0
        assert not list(store.list("v1/tombs/")) and fsck(store, NOW).problems == ()
    record({"part": "kill gc", "store": "local", "kills": kills, "recovered": kills})


# --- copy ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", ONCE_OR_TEN_TIMES)
def test_a_copy_killed_at_any_point_is_finished_by_the_next_run(
    zygote: Zygote, old: Path, tmp_path: Path, times: int, record: Keep
) -> None:
    source, half = fresh(old, tmp_path / "source"), tmp_path / "half"
    assert zygote.run("copy", source.url, f"file://{half}") == 0
    good = current(LocalStore(half, authority.shared()))
    for number in (20, 21, 22):
        assert zygote.run("publish", source.url, str(tmp_path / "work"), number) == 0
    points = (*mirror.FAIL_POINTS, "publish.after_pin", "store.before_link", "store.after_link")
    kills = 0
    for point in points * times:
        target = fresh(half, tmp_path / "target")
        assert killed(zygote, point, "copy", source.url, target.url)
        kills += 1
        seen = current(target)
        assert seen == (current(source) if point in ("copy.after_indexes", "copy.after_hint") else good), point
        assert zygote.run("copy", source.url, target.url) == 0
        assert current(target) == current(source)
        assert fsck(target, NOW, is_deep=True).problems == ()
    record({"part": "kill copy", "store": "local", "kills": kills, "recovered": kills})


# --- publish and promote --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["publish", "promote"])
@pytest.mark.parametrize("times", [pytest.param(10, marks=FULL)])
def test_a_publisher_or_promoter_killed_at_any_point_leaves_the_last_good_version(
    zygote: Zygote, old: Path, tmp_path: Path, job: str, times: int, record: Keep
) -> None:
    kills = 0
    for point in PUBLISH_POINTS * times:
        store = fresh(old, tmp_path / "store")
        channel = "candidate" if job == "publish" else "stable"
        if job == "promote":
            assert zygote.run("promote", store.url, "demo@candidate:12") == 0
        before, good = sound(store), current(store, channel)
        arguments = (store.url, str(tmp_path / "work"), 50) if job == "publish" else (store.url, "demo@candidate")
        if not killed(zygote, point, job, *arguments):
            continue
        kills += 1
        is_visible = point in ("publish.after_index", "publish.after_hint")
        assert sound(store)[f"demo/{channel}"] == before[f"demo/{channel}"] + is_visible, point
        assert (current(store, channel) == good) == (not is_visible)
        assert zygote.run(job, *arguments) == 0
        sound(store)
        assert current(store, channel) != good
    record({"part": f"kill {job}", "store": "local", "kills": kills, "recovered": kills})


# --- at any time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=FULL)])
def test_kills_at_random_times_lose_nothing(
    zygote: Zygote, old: Path, tmp_path: Path, kills: int, record: Keep
) -> None:
    store, target = fresh(old, tmp_path / "store"), LocalStore(tmp_path / "target", authority.shared())
    chance = random.Random(4)
    counts = {"kills": 0, "too_late": 0, "runs": 0}
    number = 100
    while counts["kills"] < kills:
        number += 1
        job, arguments = chance.choice(
            [
                ("publish", (store.url, str(tmp_path / "work"), number)),
                ("promote", (store.url,)),
                ("renew", (store.url,)),
                ("gc", (store.url,)),
                ("copy", (store.url, target.url)),
            ]
        )
        age(store, "v1/tombs/", 1)  # an hour goes by between two commands
        before = sound(store)
        pid = zygote.start(job, *arguments)
        time.sleep(chance.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)  # it is not reaped before `wait`: the number is still its own
        was_killed = zygote.wait(pid) == -signal.SIGKILL
        counts["kills" if was_killed else "too_late"] += 1
        after = sound(store)
        assert all(after[channel] - version in (0, 1) for channel, version in before.items())
        current(store)
        age(store, "v1/tombs/", 1)
        assert zygote.run(job, *arguments) == 0, f"{job} after a kill"
        counts["runs"] += 1
        sound(store)
        if job == "copy":
            assert newest(target, "demo", "candidate") == newest(store, "demo", "candidate")
            assert fsck(target, NOW).problems == ()
    assert fsck(store, NOW, is_deep=True).problems == ()
    record({"part": "kill at random times", "store": "local", **counts, "recovered": counts["runs"]})
