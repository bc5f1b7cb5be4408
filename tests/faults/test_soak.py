"""Publish, promote, collect, restore and start, again and again, while one in a hundred goes wrong (T-SOAK).

One in a hundred requests to the store is answered wrongly or not at all, one in a hundred steps is killed at a fail point or
meets a full disk, one in a hundred restored folders is damaged. After every cycle the store is whole by the checker that knows
the layout alone; no step fails without a fault, what was told is published is current, every service starts, and what is
restored are the very bytes. In the end nothing has piled up: on the store, on the node, in the publisher.

The seed of a run is in what it prints; CACHEPIPE_SOAK_SEED gives it again.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import shlex
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest

from cachepipe.adapters import cachedir
from cachepipe.failpoints import POINTS
from cachepipe.workflows import collect
from cachepipe.workflows.fsck import fsck
from cachepipe.workflows.restore import FAIL_POINTS as RESTORE_POINTS
from tests.support import motoserver, s3
from tests.support.artifacts import NOW
from tests.support.counting import Record
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.invariants import check
from tests.support.restoring import environment, files_below, publish_release, run_restore, tree_files
from tests.support.soak import Answer, Mirror, Publisher
from tests.support.zygote import Zygote

SEED = int(os.environ.get("CACHEPIPE_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
PUBLISH_POINTS = tuple(point for point in POINTS if point.startswith(("publish.", "store.")))
KILLED_AT = {
    "publish": PUBLISH_POINTS,
    "promote": PUBLISH_POINTS,
    "gc": collect.FAIL_POINTS,
    "start": (*RESTORE_POINTS, "restore.before_exec"),
}
FAULTS = (
    Fault("drop"),
    Fault("lost", method="PUT"),
    Fault("hang", seconds=0.2),
    Fault("delay", seconds=0.2),
    Fault("status", status=500, code="InternalError"),
    Fault("status", status=503, code="SlowDown"),
    Fault("status", status=412, code="PreconditionFailed"),
    Fault("status", status=403, code="AccessDenied"),
    Fault("reset", method="GET", at=1),
    Fault("truncate", method="GET", at=1),
    Fault("shorter", method="GET", at=1),
    Fault("flip", method="GET", at=20),
)
GC_EVERY, COMMAND_EVERY = 10, 25
"""Cycles between two collections, and between two restores by a process of its own; the others are forked."""
MOST_LEFTOVERS = 6
"""Beside a folder at any time: the tree that was replaced last, and what kills and cold starts left since."""
MOST_KIB = 8 * 1024
"""By which a publisher may be heavier in its last third than in its first; its libraries still grow in a short run."""


class Sometimes(Fault):
    """A fault that hits requests by chance."""

    def __init__(self, fault: Fault, rate: float, chance: random.Random) -> None:
        super().__init__(**{**vars(fault), "times": None})
        self.rate, self.chance = rate, chance

    def takes(self, method: str, target: str, lines: str) -> bool:
        return self.chance.random() < self.rate and super().takes(method, target, lines)


@dataclass
class Soak:
    """One store, one publisher, one node; what was done, and what must be true after it."""

    base: Path
    url: str
    mirror: Mirror
    publisher: Publisher
    zygote: Zygote
    proxy: FaultProxy | None
    rate: float
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    current: dict[str, str] = field(default_factory=lambda: {"candidate": "", "stable": ""})
    """Channel → statement, after the last step."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Statement → number of what was published."""

    @property
    def root(self) -> str:
        return str(self.base / "cache" / "demo")

    def cycle(self, number: int) -> None:
        self.step("publish", number)
        self.step("promote", number)
        if number % GC_EVERY == 0:
            self.step("gc", number)
        is_there = self.start(number, is_harmed=self.harm())
        self.start(number, is_again=is_there)
        self.counts["cycles"] += 1

    # --- the store -----------------------------------------------------------------------------------------------------

    def step(self, step: str, number: int) -> None:
        """Takes one step in some way, and fails unless the store is as before or as it was to become."""
        before, hits = self.current, self.hits()
        must_succeed = False
        if self.chance.random() < self.rate:
            self.killed(step, "soak", self.url, self.root, step, number, True)
        elif self.proxy is None and self.chance.random() < self.rate:
            assert self.zygote.run("soak", self.url, self.root, step, number, False) == 0
            self.counts["full"] += 1
        else:
            answer = self.publisher.ask(step, number)
            self.answers.append(answer)
            self.counts["failed steps"] += bool(answer.error)
            must_succeed = not answer.error
            assert must_succeed or self.hits() > hits, f"{step}: {answer.error} without a fault"
        after = self.current = self.looked_at()
        is_new = after["candidate"] != before["candidate"]
        if is_new:
            self.numbers[after["candidate"]] = number
        assert not is_new or step == "publish"
        assert after["stable"] in (before["stable"], before["candidate"] if step == "promote" else before["stable"])
        assert not must_succeed or step != "publish" or is_new, "what was told is published is current"
        assert not must_succeed or step != "promote" or after["stable"] == after["candidate"]

    def killed(self, step: str, job: str, *arguments: object) -> bool:
        point = self.chance.choice(KILLED_AT[step])
        code = self.zygote.run(job, *arguments, environment={"CACHEPIPE_FAILPOINT": point})
        assert code in (-signal.SIGKILL, 0), f"{step} at {point}: exit code {code}"
        self.counts["kills"] += code != 0
        return code != 0

    def looked_at(self) -> dict[str, str]:
        """Returns channel → statement that is current, of a store that is whole by its layout."""
        self.mirror.refresh()
        versions, problems = check(self.mirror.folder, is_collected=True)
        assert problems == []
        found = {"candidate": "", "stable": ""}
        for place, version in versions.items():
            path = self.mirror.folder / "v1/index" / place / f"{version:010d}.dsse.json"
            (row,) = json.loads(base64.b64decode(json.loads(path.read_bytes())["payload"]))["rows"]
            found[place.partition("/")[2]] = row["statement"]
        return found

    def hits(self) -> int:
        return sum(fault.hits for fault in self.proxy.faults) if self.proxy else 0

    # --- the node ------------------------------------------------------------------------------------------------------

    def harm(self) -> bool:
        """Damages a restored file by chance, so that its stat is another."""
        files = sorted(path for path in Path(self.root).rglob("*") if path.is_file() and path.name != ".lease")
        if not files or self.chance.random() >= self.rate:
            return False
        self.counts["damaged"] += 1
        self.chance.choice(files).write_bytes(b"damaged")
        return True

    def start(self, number: int, is_harmed: bool = False, is_again: bool = False) -> bool:
        """Starts the service; returns whether it came to the current release's folder, which then holds the right bytes."""
        wanted, hits = self.current["stable"], self.hits()
        words = [self.url, "--name", "demo", "--dest", self.root, "--deadline", "20", "--no-attach"]
        log = str(self.base / "log")
        self.counts["starts"] += 1
        has_room = self.chance.random() >= self.rate
        if self.chance.random() < self.rate and self.killed("start", "start_service", words, log, True):
            return False
        if not has_room:
            self.counts["full"] += 1
        if has_room and number % COMMAND_EVERY == 0:
            ran = run_restore(self.base, *words, "--", "true", env={**environment(self.base), **s3.environment()})
            assert ran.code == 0
            line = ran.line
        else:
            assert self.zygote.run("start_service", words, log, has_room) == 0, "the service starts whatever happens"
            (text,) = [text for text in Path(log).read_text().splitlines() if text.startswith("cachepipe restore ")]
            line = dict(word.partition("=")[::2] for word in shlex.split(text)[2:])
        outcome = line["outcome"]
        self.counts[outcome] += 1
        is_faultless = has_room and self.hits() == hits
        if outcome == "cold":
            assert not is_faultless, line
        else:
            assert (line["digest"], line["folder"]) == (wanted, self.root)
            files = tree_files(self.root, self.numbers[wanted])
            assert files_below(self.root) == files, "every byte is right"
            assert not (is_harmed and outcome == "present")
            assert not (is_again and is_faultless and outcome != "present"), line
        self.age_leftovers()
        return outcome != "cold"

    def age_leftovers(self) -> None:
        """An hour goes by: what starts leave beside a folder may go at the next restore."""
        then = time.time() - 2 * cachedir.STALE_S
        left = [*Path(self.root).parent.glob("demo.*"), *(self.base / "tmp").glob(f"cachepipe-{os.geteuid()}/*")]
        for path in left:
            os.utime(path, (then, then))
        self.counts["most leftovers"] = max(self.counts["most leftovers"], len(left))


def test_restores_one_after_another_leave_the_last_replaced_tree_alone(tmp_path: Path) -> None:
    words = ["--name", "demo", "--dest", str(tmp_path / "cache" / "demo"), "--no-attach"]
    (tmp_path / "cache").mkdir(mode=0o700)
    zygote = Zygote({"TMPDIR": environment(tmp_path)["TMPDIR"]})
    for number in range(12):
        url = publish_release(tmp_path, number=number).store.url
        assert zygote.run("start_service", [url, *words], str(tmp_path / "log"), True) == 0
        left = [*(tmp_path / "cache").glob("demo.*")]
        assert len(left) <= 1, f"{number}: {left}"
        for path in left:
            os.utime(path, (0, 0))  # an hour goes by
    zygote.close()


@pytest.fixture
def soak(
    kind: str, rate: float, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Soak]:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    chance = random.Random(SEED)
    (tmp_path / "cache").mkdir(mode=0o700)
    variables = {**s3.environment(), "TMPDIR": environment(tmp_path)["TMPDIR"]}
    with ExitStack() as stack:
        proxy, url = None, f"file://{tmp_path}/store"
        store = s3.opened(url)
        if kind == "moto":
            server: motoserver.Moto = request.getfixturevalue("moto_s3")
            proxy = stack.enter_context(FaultProxy(server.port))
            url = s3.address(proxy.url)
            store = s3.opened(url.replace(quote(proxy.url, safe=""), quote(server.endpoint, safe="")))
        root = str(tmp_path / "cache" / "demo")
        publisher, zygote = Publisher(url, root, variables), Zygote(variables)
        stack.callback(publisher.close)
        stack.callback(zygote.close)
        made = Soak(tmp_path, url, Mirror(store, tmp_path / "store"), publisher, zygote, proxy, 0.0, chance)
        made.cycle(0)
        made.rate = rate
        for fault in FAULTS if proxy else ():
            proxy.add(Sometimes(fault, rate / len(FAULTS), random.Random(chance.random())))
        yield made


@pytest.mark.parametrize(
    ("kind", "cycles", "rate"),
    [
        ("local", 10, 0.1),
        ("moto", 4, 0.05),
        pytest.param("local", 1000, 0.01, marks=pytest.mark.nightly),
        pytest.param("moto", 500, 0.01, marks=pytest.mark.nightly),
    ],
)
def test_cycles_with_faults_break_nothing_and_nothing_piles_up(
    soak: Soak, kind: str, cycles: int, record: Callable[[Record], None]
) -> None:
    print(f"CACHEPIPE_SOAK_SEED={SEED}")
    for number in range(1, cycles + 1):
        soak.cycle(number)
        if soak.proxy is not None:
            soak.counts["requests"] += soak.proxy.count()
            soak.proxy.log.clear()
    faults = soak.hits() + sum(soak.counts[name] for name in ("kills", "full", "damaged"))
    counts: dict[str, str | int | float] = {
        "part": "soak",
        "store": kind,
        "seed": SEED,
        **soak.counts,
        "faults": faults,
    }
    assert faults > 0
    if soak.proxy is not None:
        soak.proxy.faults.clear()
    counts |= nothing_piled_up(soak, cycles)
    record(counts)


def nothing_piled_up(soak: Soak, cycles: int) -> dict[str, int]:
    """Returns what is left and what the publisher weighs; a healthy cycle and a collection come before."""
    soak.rate = 0.0
    soak.cycle(GC_EVERY * (cycles + 1))
    for path in soak.mirror.folder.glob(".tmp/*"):
        os.utime(path, (0, 0))  # a day goes by
    store = s3.opened(soak.url)
    collect.gc(store, floors=collect.FLOORS, deletes=True)
    collect.gc(store, floors=collect.Floors(0.0, 0.0, 1, 0.0), deletes=True)
    collect.gc(store, floors=collect.Floors(0.0, 0.0, 1, 0.0, 0.0), deletes=True)
    assert fsck(store, NOW).problems == ()
    soak.mirror.refresh_wholly()
    assert soak.looked_at() == soak.current
    assert soak.current["candidate"] == soak.current["stable"]
    files = [path for path in soak.mirror.folder.rglob("*") if path.is_file()]
    kinds = Counter(re.sub(r"[0-9A-Za-z]{10,}", "*", str(path.relative_to(soak.mirror.folder))) for path in files)
    artifacts = {path.name for path in (soak.mirror.folder / "v1/artifacts").iterdir()}
    assert len(artifacts) == 1, kinds
    others = [kind for kind in kinds if not kind.startswith(("v1/index/", "v1/artifacts/", ".keys/"))]
    assert others == ["v1/format.json"], kinds
    cachedir.sweep(soak.root, time.time())
    node = sorted(path.name for path in Path(soak.root).parent.iterdir())
    assert node == [".demo.lock", ".state", "demo"]
    assert soak.counts["most leftovers"] <= MOST_LEFTOVERS
    third = len(soak.answers) // 3
    first, last = soak.answers[:third], soak.answers[-third:]
    weight = [statistics.median(answer.rss_kib for answer in part) for part in (first, last)]
    opened = [max(answer.open_files for answer in part) for part in (first, last)]
    assert weight[1] - weight[0] < MOST_KIB and opened[1] <= opened[0] + 2
    bytes_left = sum(path.stat().st_size for path in files if "/artifacts/" in str(path))
    names = ("rss_first_kib", "rss_last_kib", "files_open_first", "files_open_last", "artifact_bytes")
    return dict(zip(names, map(int, (*weight, *opened, bytes_left)), strict=True))
