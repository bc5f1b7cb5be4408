"""Everybody at once: publishers, promoters and collectors; what is current is always whole, and nothing that was told is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachepipe.workflows.fetch import newest, read_index_version
from cachepipe.workflows.fsck import fsck
from tests.support import s3
from tests.support.artifacts import NOW
from tests.support.counting import Record
from tests.support.zygote import Zygote

FULL = pytest.mark.nightly


@dataclass(frozen=True)
class Place:
    """A fresh store, and what starts processes that use it."""

    kind: str
    url: str
    zygote: Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    started = Zygote(s3.environment())
    yield started
    started.close()


@pytest.fixture
def place(
    kind: str, zygote: Zygote, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    if kind == "local":
        return Place(kind, f"file://{tmp_path}/store", zygote)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    server = request.getfixturevalue("moto_s3" if kind == "moto" else "s3_server")
    return Place(kind, s3.address(server.endpoint), zygote)


# --- gc ---------------------------------------------------------------------------------------------------------------


def stress(place: Place, folder: Path, checks: int, is_naive: bool = False) -> dict[str, int]:
    """Returns the sums of what two publishers, two promoters, two collectors and one checker counted."""
    stop, logs = str(folder / "stop"), [str(folder / f"log-{number}") for number in range(7)]
    url, start = place.url, place.zygote.start
    place.zygote.run("publish", url, str(folder / "first"), 99_999)
    pids = [
        *(start("stress_publisher", url, str(folder / f"p{n}"), n, stop, logs[n]) for n in (0, 1)),
        *(start("stress_promoter", url, n, stop, logs[n]) for n in (2, 3)),
        *(start("stress_collector", url, stop, logs[n], is_naive) for n in (4, 5)),
        start("stress_checker", url, checks, 1200.0, stop, logs[6]),
    ]
    codes = [place.zygote.wait(pid) for pid in pids]
    assert is_naive or codes == [0] * 7
    found = [json.loads(Path(log).read_text()) for log in logs if Path(log).exists()]
    return {name: sum(counts.get(name, 0) for counts in found) for name in {key for counts in found for key in counts}}


@pytest.mark.parametrize(
    ("kind", "checks"),
    [
        ("local", 100),
        ("seaweedfs", 20),
        *(pytest.param(kind, 1000, marks=FULL) for kind in ("local", "moto", "seaweedfs")),
    ],
)
def test_what_a_channel_names_is_whole_whoever_publishes_promotes_and_collects(
    place: Place, tmp_path: Path, checks: int, record: Callable[[Record], None]
) -> None:
    counts = stress(place, tmp_path, checks)
    record({"part": "gc stress", "store": place.kind, **counts})
    assert counts["broken"] == 0
    assert counts["checks"] >= checks
    assert min(counts["published"], counts["promoted"] + counts["refused"], counts["removed"]) > 0, counts
    store = s3.opened(place.url)
    assert fsck(store, NOW).problems == ()
    assert not list(store.list("v1/pins/")) and not list(store.list("v1/tombs/"))


@FULL
@pytest.mark.parametrize("kind", ["local"])
def test_the_same_stress_breaks_a_collector_that_does_not_look_twice(
    place: Place, tmp_path: Path, record: Callable[[Record], None]
) -> None:
    counts = stress(place, tmp_path, 300, is_naive=True)
    record({"part": "gc stress without the second look", "store": place.kind, **counts})
    assert counts["broken"] > 0


# --- publishers ---------------------------------------------------------------------------------------------------------


def race(place: Place, folder: Path, writers: int, rounds: int) -> dict[str, int]:
    """Fails unless every version has one winner and no publisher lost what it was told is published."""
    logs = [folder / f"told-{writer}" for writer in range(writers)]
    pids = [
        place.zygote.start("publish_rounds", place.url, str(folder / f"w{n}"), n, rounds, str(log))
        for n, log in enumerate(logs)
    ]
    assert [place.zygote.wait(pid) for pid in pids] == [0] * writers
    told = [log.read_text().split() for log in logs]
    store = s3.opened(place.url)
    current = newest(store, "demo", "candidate")
    assert current is not None and current.version == writers * rounds
    before: set[str] = set()
    appeared: list[str] = []
    for version in range(1, current.version + 1):
        rows = {row.statement for row in read_index_version(store, "demo", "candidate", version, None).index.rows}
        assert len(rows - before) == 1, f"version {version}: one winner, one new row"
        assert len(before - rows) <= 1
        appeared += rows - before
        before = rows
    assert sorted(appeared) == sorted(statement for statements in told for statement in statements), "nothing is lost"
    assert before == {statements[-1] for statements in told}
    assert fsck(store, NOW).problems == ()
    assert not list(store.list("v1/pins/"))
    return {"publishers": writers, "rounds": rounds, "published": len(appeared), "versions": current.version, "lost": 0}


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        ("local", 2),
        ("seaweedfs", 1),
        pytest.param("local", 100, marks=FULL),
        pytest.param("moto", 100, marks=FULL),
        pytest.param("seaweedfs", 8, marks=FULL),
    ],
)
def test_of_eight_publishers_none_loses_what_it_was_told_is_published(
    place: Place, tmp_path: Path, rounds: int, record: Callable[[Record], None]
) -> None:
    record({"part": "publishers", "store": place.kind, **race(place, tmp_path, 8, rounds)})
