"""What the processes of crash and race tests do; started by name through `tests.support.zygote`."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3  # noqa: F401 - imported before the fork, so that no job pays for it
import botocore.session  # noqa: F401

from cachepipe.adapters import s3 as s3_boto3
from cachepipe.adapters.packs import pack_tree  # noqa: F401
from cachepipe.adapters.store import Store
from cachepipe.domain.collect import Floors
from cachepipe.errors import CachepipeError, ConflictError, IntegrityError, MissError
from cachepipe.workflows import channels, collect, mirror
from cachepipe.workflows import publish as publishing
from cachepipe.workflows.fetch import newest, read_artifact, read_index_version
from tests.support import s3
from tests.support import soak as steps
from tests.support.artifacts import CPU_PARTS, NOW, make_artifact
from tests.support.soak import start_service  # noqa: F401 - started by its name

LIMIT_S = 3600.0
BEGAN = time.monotonic()
"""When the zygote was started; nobody waits for its jobs longer than this."""

NO_FLOORS = Floors(unfinished_s=0.0, published_s=0.0, versions=1)
"""Only pins and current versions protect: every race that floors would hide can happen."""


def load_models() -> None:
    """Reads what boto3 reads for its first client, so that no job pays for it."""
    s3_boto3._core().get_service_model("s3")
    s3_boto3._core().get_component("endpoint_resolver")


def publish(url: str, folder: str, number: int, channel: str = "candidate", threads: str = "2") -> None:
    """Publishes artifact `number`; `threads` makes it another target."""
    Path(folder).mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder))  # an earlier try may have been killed: the same artifact is packed again
    packed = make_artifact(work, number, {**CPU_PARTS, "threads": threads})
    publishing.publish(s3.opened(url), "demo", channel, packed, NOW)


def publish_rounds(url: str, folder: str, writer: int, rounds: int, log: str) -> None:
    """Publishes artifact after artifact for a target of its own, and logs every statement that it was told is published."""
    store = s3.opened(url)
    Path(folder).mkdir()
    with Path(log).open("w") as told:
        for round_ in range(rounds):
            number = writer * 100_000 + round_
            packed = make_artifact(Path(folder), number, {**CPU_PARTS, "threads": str(writer)})
            row = publishing.publish(store, "demo", "candidate", packed, NOW)
            told.write(f"{row.statement}\n")


def promote(url: str, ref: str | None = None) -> None:
    channels.promote(s3.opened(url), "demo", "candidate", "stable", ref, NOW)


def renew(url: str) -> None:
    channels.renew(s3.opened(url), "demo", "candidate", NOW)


def gc(url: str) -> None:
    collect.gc(s3.opened(url), deletes=True)


def copy(source: str, target: str) -> None:
    mirror.copy(s3.opened(source), s3.opened(target), (), ())


def soak(url: str, root: str, step: str, number: int, has_room: bool) -> None:
    """Takes one step of the soak; what became of it the store tells."""
    try:
        steps.take(s3.opened(url), root, step, number, has_room)
    except CachepipeError:
        pass


# --- the stress of gc: everybody at once, until a file says stop ------------------------------------------------------------


def _goes_on(stop: str) -> bool:
    """False when the checker has ended, or when nobody is left to end us."""
    return not os.path.exists(stop) and os.getppid() != 1 and time.monotonic() < BEGAN + LIMIT_S


def _count(path: str, counts: dict[str, int]) -> None:
    Path(path).write_text(json.dumps(counts))


def stress_publisher(url: str, folder: str, writer: int, stop: str, log: str) -> None:
    """Publishes until told to stop; now and then it takes its time between announcement and upload."""
    store, chance = s3.opened(url), random.Random(writer)
    Path(folder).mkdir()
    counts = {"published": 0}
    while _goes_on(stop):
        packed = make_artifact(Path(folder), writer * 100_000 + counts["published"], CPU_PARTS)
        publishing.publish(store, "demo", "candidate", packed, NOW)
        counts["published"] += 1
        time.sleep(chance.uniform(0, 0.02))
    _count(log, counts)


def stress_promoter(url: str, seed: int, stop: str, log: str) -> None:
    """Promotes artifacts of old and new versions, most of which gc is after; a refusal is fine, a broken channel is not."""
    store, chance = s3.opened(url), random.Random(seed)
    counts = {"promoted": 0, "refused": 0}
    while _goes_on(stop):
        found = newest(store, "demo", "candidate")
        if found is None:
            continue
        version = max(1, found.version - chance.choice((0, 0, 1, 2, 5)))
        rows = read_index_version(store, "demo", "candidate", version, None).index.rows
        try:
            channels.promote(store, "demo", "candidate", "stable", rows[0].artifact, NOW)
            counts["promoted"] += 1
        except (MissError, ConflictError, IntegrityError):
            counts["refused"] += 1  # gc was there first
    _count(log, counts)


def stress_collector(url: str, stop: str, log: str, is_naive: bool = False) -> None:
    """Collects without floors; `is_naive` never looks a second time, as a sweep without announcements would not."""
    store = s3.opened(url)
    counts = {"runs": 0, "removed": 0}
    if is_naive:
        collect._look_again = lambda store, artifacts: collect.take_inventory(())
        publishing._await_no_tomb = lambda store, artifact: None
    while _goes_on(stop):
        done = collect.gc(store, floors=NO_FLOORS, deletes=True)
        counts["runs"] += 1
        counts["removed"] += len(done.removed)
    _count(log, counts)


def stress_checker(url: str, checks: int, limit_s: float, stop: str, log: str) -> None:
    """Looks whether every artifact that a current version names is whole, by keys alone; ends the stress."""
    store = s3.opened(url)
    counts = {"checks": 0, "broken": 0, "superseded": 0}
    give_up = time.monotonic() + limit_s
    try:
        while counts["checks"] < checks and time.monotonic() < give_up:
            for channel in ("candidate", "stable"):
                _check_channel(store, channel, counts)
    finally:
        _count(log, counts)
        Path(stop).touch()


def _check_channel(store: Store, channel: str, counts: dict[str, int]) -> None:
    found = newest(store, "demo", channel)
    if found is None:
        return
    is_whole = all(_is_whole(store, row) for row in found.index.rows)
    again = newest(store, "demo", channel)
    if not is_whole and again is not None and again.version != found.version:
        counts["superseded"] += 1  # it was no longer current, and without floors gc may take it at once
        return
    counts["checks"] += 1
    counts["broken"] += not is_whole


def _is_whole(store: Store, row: Any) -> bool:
    try:
        statement = read_artifact(store, row, "demo").statement
    except IntegrityError:
        return False
    return publishing.missing_objects(store, statement) == 0
