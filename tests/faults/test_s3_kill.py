"""kill -9 of what writes a real S3 server, at every named point and at any other time: the last good version stays restorable,
and running the command again finishes its work."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from cachepipe.adapters.store import Store
from cachepipe.domain.index import IndexRow
from cachepipe.failpoints import POINTS
from cachepipe.workflows import mirror
from cachepipe.workflows.fetch import newest, read_artifact, read_file_table
from cachepipe.workflows.fsck import fsck
from tests.support import s3, seaweed, store_jobs
from tests.support.artifacts import NOW
from tests.support.counting import Record
from tests.support.invariants import check
from tests.support.zygote import Zygote

FULL = pytest.mark.nightly
PUBLISH_POINTS = tuple(point for point in POINTS if point.startswith("publish."))
VISIBLE = ("publish.after_index", "publish.after_hint")
COPIED = ("copy.after_indexes", "copy.after_hint")
COMMANDS_PER_STORE = 12
"""Of random kills: more make a store that takes longer to check than to write."""
Keep = Callable[[Record], None]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    started = Zygote(s3.environment())
    yield started
    started.close()


@pytest.fixture
def server(s3_server: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the server, which this process may write to."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server.endpoint


class Shop:
    """A store with one release in the channels candidate and stable, and what runs commands on it."""

    def __init__(self, endpoint: str, zygote: Zygote, folder: Path) -> None:
        self.zygote, self.folder = zygote, folder
        self.url, self.target_url = s3.address(endpoint), s3.address(endpoint)
        store_jobs.publish(self.url, str(folder / "work"), 1)
        store_jobs.promote(self.url)

    @property
    def store(self) -> Store:
        return s3.opened(self.url)

    def run(self, job: str, *arguments: object) -> None:
        assert self.zygote.run(job, *arguments) == 0, job

    def killed(self, point: str, job: str, *arguments: object) -> bool:
        """Runs a job that is killed at a point; False: it never came there, and has succeeded."""
        code = self.zygote.run(job, *arguments, environment={"CACHEPIPE_FAILPOINT": point})
        assert code in (-signal.SIGKILL, 0), f"{job} at {point}: exit code {code}"
        return code != 0

    def sound(self, url: str = "") -> dict[str, int]:
        """Fails if a promise is broken, by the checker that knows the layout alone; returns the newest versions.

        Args:
            url: of a copy, which does not take what only old versions name; default: the store itself.
        """
        folder = self.folder / "mirrored"
        shutil.rmtree(folder, ignore_errors=True)
        store = s3.opened(url or self.url)
        for key in store.list(""):
            data = store.get(key, 1 << 30)
            assert data is not None
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(data)
        versions, problems = check(folder, is_collected=bool(url))
        assert problems == []
        return versions


def current(store: Store, channel: str) -> IndexRow | None:
    """Returns the one row that a restore would take, after reading what it would read."""
    found = newest(store, "demo", channel)
    if found is None:
        return None
    (row,) = found.index.rows
    read_file_table(store, read_artifact(store, row, "demo").statement)
    return row


@pytest.mark.parametrize(
    ("job", "points"),
    [
        ("publish", ("publish.after_first_pack", "publish.after_statement", "publish.after_index")),
        *(pytest.param(job, PUBLISH_POINTS * 10, marks=FULL, id=f"{job}-10") for job in ("publish", "promote")),
    ],
)
def test_a_publisher_or_promoter_killed_at_any_point_leaves_the_last_good_version_on_s3(
    zygote: Zygote, server: str, tmp_path: Path, job: str, points: tuple[str, ...], record: Keep
) -> None:
    channel = "candidate" if job == "publish" else "stable"
    kills = 0
    for point in points:
        shop = Shop(server, zygote, tmp_path)
        if job == "promote":
            store_jobs.publish(shop.url, str(tmp_path / "work"), 2)
        good = current(shop.store, channel)  # version 1
        arguments = (shop.url, str(tmp_path / "work"), 2) if job == "publish" else (shop.url,)
        if not shop.killed(point, job, *arguments):
            continue
        kills += 1
        assert shop.sound()[f"demo/{channel}"] == 1 + (point in VISIBLE), point
        assert (current(shop.store, channel) == good) == (point not in VISIBLE)
        shop.run(job, *arguments)
        shop.sound()
        assert current(shop.store, channel) != good
    assert kills >= len(points) / 2
    record({"part": f"kill {job}", "store": "seaweedfs", "kills": kills, "recovered": kills})


@FULL
@pytest.mark.parametrize("times", [10])
def test_a_copy_killed_at_any_point_is_finished_by_the_next_run_on_s3(
    zygote: Zygote, server: str, tmp_path: Path, times: int, record: Keep
) -> None:
    kills = 0
    for point in (*mirror.FAIL_POINTS, "publish.after_pin") * times:
        shop = Shop(server, zygote, tmp_path)
        store_jobs.copy(shop.url, shop.target_url)
        store_jobs.publish(shop.url, str(tmp_path / "work"), 2)
        target = s3.opened(shop.target_url)
        good = current(target, "candidate")
        assert shop.killed(point, "copy", shop.url, shop.target_url), point
        kills += 1
        seen, wanted = current(target, "candidate"), current(shop.store, "candidate")
        assert seen == wanted if point in COPIED else seen in (good, wanted), point
        shop.run("copy", shop.url, shop.target_url)
        assert shop.sound(shop.target_url) == shop.sound()
        assert fsck(target, NOW, is_deep=True).problems == ()
    record({"part": "kill copy", "store": "seaweedfs", "kills": kills, "recovered": kills})


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=FULL)])
def test_kills_at_random_times_lose_nothing_on_s3(
    zygote: Zygote, server: str, tmp_path: Path, kills: int, record: Keep
) -> None:
    chance, numbers = random.Random(6), count(2)
    counts = {"kills": 0, "too_late": 0, "runs": 0}
    takes_s = {"publish": 0.2, "promote": 0.2, "renew": 0.2, "copy": 0.2}
    """Of each job, so that it is killed at what it does, and not only at its start."""
    shop = Shop(server, zygote, tmp_path)
    before = shop.sound()
    while counts["kills"] < kills:
        if counts["runs"] % COMMANDS_PER_STORE == COMMANDS_PER_STORE - 1:
            assert fsck(shop.store, NOW, is_deep=True).problems == ()
            shop = Shop(server, zygote, tmp_path)
            before = shop.sound()
        job = chance.choice(sorted(takes_s))
        arguments: dict[str, tuple[object, ...]] = {
            "publish": (str(tmp_path / "work"), next(numbers)),
            "copy": (shop.target_url,),
        }
        words = (shop.url, *arguments.get(job, ()))
        pid = zygote.start(job, *words)
        time.sleep(chance.uniform(0, takes_s[job]))
        os.kill(pid, signal.SIGKILL)  # it is not reaped before `wait`: the number is still its own
        counts["kills" if zygote.wait(pid) == -signal.SIGKILL else "too_late"] += 1
        after = shop.sound()
        assert all(after[channel] - version in (0, 1) for channel, version in before.items())
        began = time.monotonic()
        shop.run(job, *words)
        takes_s[job] = time.monotonic() - began
        counts["runs"] += 1
        before = shop.sound()
        assert current(shop.store, "candidate") and current(shop.store, "stable")
        if job == "copy":
            assert shop.sound(shop.target_url) == before
    assert fsck(shop.store, NOW, is_deep=True).problems == ()
    record({"part": "kill at random times", "store": "seaweedfs", **counts, "recovered": counts["runs"]})
