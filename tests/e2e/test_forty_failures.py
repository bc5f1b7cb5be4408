"""T-EXEC: whatever fails before it, the service starts: within the deadline + 2 s, with a private folder, and one line says why.

Each failure is real: files and mounts as they can be found, calls that never return (a preloaded library), limits of the
kernel, broken installations. The service prints where its compile cache is.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from cachepipe.domain.index import PAYLOAD_TYPE, first_index, index_bytes, timestamp
from cachepipe.domain.layout import FORMAT_KEY, index_key
from cachepipe.domain.trust import seal
from cachepipe.runtime import attempts
from tests.support import hanging
from tests.support.artifacts import CUDA_PARTS, parts_of
from tests.support.authority import key, policy, write_policy
from tests.support.restoring import Published, Ran, environment, publish_release, restore_words

DEADLINE_S = 3.0
SERVICE = ("sh", "-c", 'echo "started $TORCHINDUCTOR_CACHE_DIR"')


@dataclass
class Start:
    """One start as a test prepares it."""

    base: Path
    demo: Published
    words: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    before: str = ""
    """A shell line that comes first: limits, mounts."""

    @property
    def store(self) -> Path:
        return Path(self.demo.store.root)

    @property
    def artifact(self) -> Path:
        return self.store / "v1/artifacts" / self.demo.row.artifact

    @property
    def index(self) -> Path:
        return self.store / index_key("demo", "stable", 1)

    def channel(self, *more: str) -> None:
        self.words = [self.demo.store.url, "--name", "demo", *more]

    def put_index(self, **changes: object) -> None:
        now = datetime.now(timezone.utc)
        index = replace(first_index("demo", "stable", (self.demo.row,), now, "n"), version=2, **changes)  # type: ignore[arg-type]
        self.demo.store.put_if_absent(
            index_key("demo", "stable", 2), self.demo.store.trust.seal(index_bytes(index), PAYLOAD_TYPE)
        )


def broken_module(start: Start, name: str, text: str) -> None:
    (start.base / "broken").mkdir()
    (start.base / "broken" / f"{name}.py").write_text(text)
    start.env["PYTHONPATH"] = f"{start.base}/broken:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}"


def hang(start: Start, call: str) -> None:
    start.env |= {**hanging.variables(), "HANG": call}


def hang_s3(start: Start, call: str) -> None:
    hang(start, call)
    start.env |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "eu-central-1"}
    start.env["AWS_ENDPOINT_URL"] = "http://store.invalid:9000" if call == "getaddrinfo" else "http://127.0.0.1:9"
    start.words = ["s3://ml-cache/prod", "--name", "demo"]


def hang_nvml(start: Start) -> None:
    gpu = publish_release(start.base, "gpu", device="cuda", fingerprint=parts_of(CUDA_PARTS))
    hang(start, "nvml")
    start.words = [gpu.store.url, "--name", "gpu"]


def other_machine(start: Start) -> None:
    parts = tuple(replace(p, value="9.9.9") if p.name == "torch" else p for p in start.demo.statement.fingerprint)
    publish_release(start.base, "other", fingerprint=parts)
    start.words = [start.demo.store.url, "--name", "other"]


def lock(start: Start, make: Callable[[Path], object]) -> None:
    path = start.base / "bad.lock"
    make(path)
    start.words = [start.demo.store.url, "--lock", str(path)]


def later_format(start: Start) -> None:
    """A restore asks for the format where it finds no channel: what it can read was written for it."""
    (start.store / FORMAT_KEY).write_text('{"features":[],"format":9}\n')
    shutil.rmtree(start.store / "v1" / "index")


def trust_file(start: Start, make: Callable[[Path], object]) -> None:
    path = start.base / "bad.json"
    make(path)
    start.channel("--trust", str(path))


def unsigned(start: Start) -> None:
    now = datetime.now(timezone.utc)
    index = replace(first_index("demo", "stable", (start.demo.row,), now, "n"), version=2)
    start.demo.store.put_if_absent(index_key("demo", "stable", 2), seal(index_bytes(index), PAYLOAD_TYPE))


def quarantined(start: Start) -> None:
    for number in range(2):
        mark = start.base / "state/attempts" / start.demo.row.statement / f"start{number}.1"
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps({"pid": 1, "time": int(time.time())}))
    assert attempts.unfinished(str(start.base / "state"), start.demo.row.statement, time.time()) == 2
    start.channel("--state-dir", str(start.base / "state"))


def pipe_for(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


FAILURES: dict[str, Callable[[Start], object]] = {
    "no store": lambda s: setattr(s, "words", ["--name", "demo"]),
    "no name": lambda s: setattr(s, "words", [s.demo.store.url]),
    "a name that cannot be one": lambda s: setattr(s, "words", [s.demo.store.url, "--name", "../x"]),
    "an absent release": lambda s: setattr(s, "words", [s.demo.store.url, "--name", "absent"]),
    "an absent channel": lambda s: s.channel("--channel", "absent"),
    "an unknown option": lambda s: s.channel("--wat"),
    "a value that is missing": lambda s: s.channel("--channel"),
    "a deadline that is none": lambda s: s.channel("--deadline", "soon"),
    "two stores": lambda s: s.channel("file:///other"),
    "an absent store": lambda s: setattr(s, "words", ["file:///no/such", "--name", "demo"]),
    "a store that is a file": lambda s: setattr(s, "words", [f"file://{s.demo.lock}", "--name", "demo"]),
    "a foreign scheme": lambda s: setattr(s, "words", ["gopher://x", "--name", "demo"]),
    "a store of a later format": later_format,
    "an absent lock file": lambda s: lock(s, lambda path: None),
    "a lock file of garbage": lambda s: lock(s, lambda path: path.write_bytes(os.urandom(100))),
    "a lock file that is a folder": lambda s: lock(s, Path.mkdir),
    "a lock file that is a pipe nobody writes": lambda s: lock(s, pipe_for),
    "a lock file of another release": lambda s: setattr(
        s, "words", [s.demo.store.url, "--name", "x", "--lock", s.demo.lock]
    ),
    "an absent policy": lambda s: trust_file(s, lambda path: None),
    "a policy of garbage": lambda s: trust_file(s, lambda path: path.write_text("{}")),
    "a policy that is a pipe nobody writes": lambda s: trust_file(s, pipe_for),
    "a policy that others can change": lambda s: trust_file(s, lambda p: Path(write_policy(p)).chmod(0o666)),
    "a policy of other keys": lambda s: trust_file(
        s, lambda p: write_policy(p, policy(key("x", "statement", "index")))
    ),
    "insecure-unsigned beside a policy": lambda s: s.channel(
        "--trust", write_policy(s.base / "p"), "--insecure-unsigned"
    ),
    "an unsigned index": unsigned,
    "an index that has expired": lambda s: s.put_index(
        created_at=timestamp(datetime.now(timezone.utc) - timedelta(days=20)),
        expires_at=timestamp(datetime.now(timezone.utc) - timedelta(days=6)),
    ),
    "an index from the future": lambda s: s.put_index(
        created_at=timestamp(datetime.now(timezone.utc) + timedelta(hours=2))
    ),
    "an index that was cut": lambda s: os.truncate(s.index, 100),
    "an index that is a pipe nobody writes": lambda s: pipe_for(s.index),
    "a statement that was cut": lambda s: os.truncate(s.artifact / "statement.dsse.json", 100),
    "a statement that is gone": lambda s: (s.artifact / "statement.dsse.json").unlink(),
    "a file table that is gone": lambda s: (s.artifact / "packs" / s.demo.statement.table.digest).unlink(),
    "a pack that is gone": lambda s: (s.artifact / "packs" / s.demo.statement.packs[0].digest).unlink(),
    "a pack of other bytes": lambda s: (s.artifact / "packs" / s.demo.statement.packs[0].digest).write_bytes(b"x" * 99),
    "a pack that is a pipe nobody writes": lambda s: pipe_for(s.artifact / "packs" / s.demo.statement.packs[0].digest),
    "another machine's artifact": other_machine,
    "a clock of 1970": lambda s: s.env.update({**hanging.variables(), "EPOCH": "1"}),
    "statvfs that never returns": lambda s: hang(s, "statvfs"),
    "flock that never returns": lambda s: hang(s, "flock"),
    "rename that never returns": lambda s: hang(s, "rename"),
    "a write that never returns": lambda s: hang(s, "pwrite"),
    "a driver that never returns": hang_nvml,
    "a name server that never answers": lambda s: hang_s3(s, "getaddrinfo"),
    "a peer that never answers": lambda s: hang_s3(s, "connect"),
    "files of no length allowed": lambda s: setattr(s, "before", "ulimit -f 0"),
    "no file descriptors left": lambda s: setattr(s, "before", "ulimit -n 5"),
    "hardly any memory": lambda s: setattr(s, "before", "ulimit -v 90000"),
    "zstandard that cannot be imported": lambda s: broken_module(s, "zstandard", "raise ImportError('broken')\n"),
    "cryptography that cannot be imported": lambda s: broken_module(s, "cryptography", "raise ImportError('broken')\n"),
    "a dependency with a bug": lambda s: broken_module(s, "zstandard", "raise ZeroDivisionError\n"),
    "quarantine": quarantined,
}
"""What it is → how it is brought about. The start comes after `channel()`, if the failure names no words of its own."""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    prepared = Start(tmp_path, publish_release(tmp_path))
    prepared.channel()
    return prepared


def run(start: Start) -> Ran:
    argv = restore_words(*start.words)
    argv = [*argv, *(() if "--deadline" in argv else ("--deadline", f"{DEADLINE_S:g}")), "--", *SERVICE]
    line = f"{start.before + '; ' if start.before else ''}exec {shlex.join(argv)}"
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", line],
        env={**environment(start.base), **start.env},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def check_started(ran: Ran, outcome: str | None) -> None:
    assert (ran.code, ran.out.partition(" ")[0]) == (0, "started"), ran.err
    assert ran.seconds < DEADLINE_S + 2
    if outcome is not None:
        assert ran.line["outcome"] == outcome
        assert ran.line["reason"] if outcome == "cold" else True
    folder = Path(ran.out.strip().partition(" ")[2]).parent
    facts = folder.stat()
    assert (stat.S_IMODE(facts.st_mode), facts.st_uid) == (0o700, os.geteuid())


def test_the_service_starts_warm_when_nothing_fails(start: Start) -> None:
    check_started(run(start), "restored")


def test_there_are_forty_failures_and_more() -> None:
    assert len(FAILURES) >= 40


@pytest.mark.parametrize("failure", FAILURES)
def test_the_service_starts_in_time_in_spite_of(start: Start, failure: str) -> None:
    FAILURES[failure](start)
    check_started(run(start), "cold")


# --- folders and mounts ----------------------------------------------------------------------------------------------------


def in_mounts(start: Start, *mounts: str) -> Ran:
    """Runs a start in a mount namespace of its own."""
    start.before = "; ".join(mounts)
    argv = restore_words(*start.words, "--deadline", f"{DEADLINE_S:g}", "--", *SERVICE)
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    began = time.monotonic()
    done = subprocess.run(
        [*namespace, "bash", "-c", f"set -e; {start.before}; exec {shlex.join(argv)}"],
        env=environment(start.base), cwd="/", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


@pytest.mark.parametrize("option", ["noexec", "ro"])
def test_a_cache_root_that_is_mounted_so_that_it_cannot_serve_gives_scratch_space(start: Start, option: str) -> None:
    cache = start.base / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    ran = in_mounts(start, f"mount -t tmpfs -o {option},mode=0700 tmpfs {cache}")
    check_started(ran, "restored")
    assert ran.line["folder"].startswith(str(start.base / "tmp"))
    assert ("noexec" if option == "noexec" else "not writable") in ran.line["reason"]


def test_a_cache_root_without_room_gives_scratch_space_and_says_both_numbers(start: Start) -> None:
    cache = start.base / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    ran = in_mounts(start, f"mount -t tmpfs -o size=64k,mode=0700 tmpfs {cache}")
    check_started(ran, "restored")
    assert "not enough room: wanted" in ran.line["reason"]


def test_a_baked_folder_on_a_read_only_root_is_named_when_no_store_answers(start: Start) -> None:
    start.words = [start.demo.store.url, "--name", "demo", "--lock", start.demo.lock]
    assert run(start).line["outcome"] == "restored"
    os.rename(start.demo.store.root, start.base / "away")
    cache = os.path.dirname(start.demo.root)
    ran = in_mounts(start, f"mount --bind {cache} {cache} && mount -o remount,bind,ro {cache}")
    check_started(ran, "cold")
    assert f"{start.demo.root} was restored before and cannot be used: read-only" in ran.line["reason"]


def test_a_restored_folder_whose_volume_is_mounted_noexec_later_is_not_taken(start: Start) -> None:
    assert run(start).line["outcome"] == "restored"
    cache = os.path.dirname(start.demo.root)
    mounts = (f"mount --bind {cache} {cache}", f"mount -o remount,bind,noexec {cache}")
    for more in ([], ["--lock", start.demo.lock]):
        start.words = [start.demo.store.url, "--name", "demo", *more]
        ran = in_mounts(start, *mounts)
        check_started(ran, None)
        assert ran.line["folder"].startswith(str(start.base / "tmp"))
        assert "noexec" in ran.line["reason"]


def test_where_no_folder_can_be_written_the_service_starts_all_the_same(start: Start) -> None:
    (start.base / "cache").mkdir(mode=0o700, exist_ok=True)
    # read-only where it is: the store and the interpreter may lie below /tmp as well
    places = dict.fromkeys([*([] if start.base.is_relative_to("/tmp") else [str(start.base)]), "/tmp", "/dev/shm"])
    mounts = [f"mount --bind {place} {place} && mount -o remount,bind,ro {place}" for place in places]
    ran = in_mounts(start, *mounts)
    assert (ran.code, ran.out.partition(" ")[0]) == (0, "started"), ran.err
    assert ran.line["outcome"] == "cold"
    assert ran.seconds < DEADLINE_S + 2
