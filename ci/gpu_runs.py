"""What `ci/gpu` does for one entry: build, publish, wipe, restore, verify, bench; one JSON line per measurement.

Every first call is made in a fresh process; variants:
  cold      torch.compile in an empty folder, as torch is installed (the builder's tune step is another)
  warm      the tuned folder itself, moved to another path
  bundle    torch.compiler.load_cache_artifacts into an empty folder, its load included
  restored  cachepipe restore from the store into an empty folder, then entry.compile
  eager     without torch.compile
  trace     torch.compile with a backend that does nothing: what no cache can save
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from gpu_install import sources_digest
from gpu_journal import Journal
from gpu_processes import Later, Outlasted, Processes
from steering import clean_environment

REPOSITORY = Path(__file__).resolve().parent.parent
CHILD_LIMIT_S = 400.0
SOURCES = "sources"
"""File of an entry's work folder: the digest of the code that began it."""
LATER = 75
"""Exit code: the time limit is near, run again to go on."""


class Counts(NamedTuple):
    """Fresh processes per variant; `cold` are those beside the tune step."""

    cold: int
    warm: int
    bundle: int
    restored: int
    eager: int
    trace: int


class Entry(NamedTuple):
    """One entry of a manifest, with the seconds that it takes on an H200 with 16 cores."""

    model: str
    mode: str
    build_s: float
    call_s: float
    """One process that calls every shape bucket, restored."""
    counts: Counts
    eager_of: str = ""
    """The entry whose eager and trace numbers hold for this one too: the mode changes neither."""

    @property
    def name(self) -> str:
        return f"{self.model}:{self.mode}"


class Failed(Exception):
    """A command failed; the rest of this entry is left out, the other entries go on."""


class Runs:
    """Measures the entries of one manifest until the time is over."""

    def __init__(self, manifest: Path, work: Path, journal: Journal, ends: float, is_noisy: bool) -> None:
        self.manifest, self.work, self.journal, self.ends = manifest, work, journal, ends
        self.build_options = ["--allow-noisy"] if is_noisy else []
        self.processes = Processes()
        self.wanted_s = 0.0
        """What a step would take for which too little time was left."""

    def is_done(self, entry: Entry) -> bool:
        return all(self.journal.has(key) for key, _, _ in self.steps(entry))

    def build_missing(self, entry: Entry) -> None:
        """Builds an entry of which something is still to be measured; raises `Later` when the time is over."""
        self.sweep(entry)
        if not self.is_done(entry) and not self.record(entry):
            self.build(entry)

    def measure_missing(self, entry: Entry) -> None:
        """Measures what is missing of a built entry; raises `Later` when the time is over."""
        if not self.record(entry):
            return
        for key, seconds, measure in self.steps(entry):
            if not self.journal.has(key):
                self.need(seconds)
                begin = time.monotonic()
                self.journal.note(key, entry=entry.name, **measure())
                say(f"{key}: done in {time.monotonic() - begin:.1f} s")
        self.folder(entry).rename(self.gone(entry))  # whole: a part of a store would be taken for one
        self.sweep(entry)

    def sweep(self, entry: Entry) -> None:
        """Removes what is done with, also what a killed invocation left of it: the host's disk is small."""
        shutil.rmtree(self.gone(entry), ignore_errors=True)

    def gone(self, entry: Entry) -> Path:
        folder = self.folder(entry)
        return folder.with_name(f"{folder.name}.gone")

    def record(self, entry: Entry) -> dict[str, Any]:
        """Returns what was written down of a build that came to its end; empty: there is none, it cannot be read, or other code
        than this built it, whose numbers would be taken for this one's."""
        try:
            found: dict[str, Any] = json.loads((self.folder(entry) / "built.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return found if self.is_ours(entry) else {}

    def is_ours(self, entry: Entry) -> bool:
        """Tells whether the work folder was begun by this code."""
        mark = self.folder(entry) / SOURCES
        return mark.exists() and mark.read_text() == str(self.journal.facts.get("sources", ""))

    def steps(self, entry: Entry) -> Sequence[tuple[str, float, Callable[[], dict[str, Any]]]]:
        """Returns (key, estimated seconds, measurement), what the targets need first."""
        found: list[tuple[str, float, Callable[[], dict[str, Any]]]] = []

        def add(variant: str, rounds: int, seconds: float, first: int = 1) -> None:
            for number in range(first, rounds + 1):
                key = f"{entry.name} · {variant} · {number}"
                found.append((key, seconds, lambda v=variant, n=number: self.first_calls(entry, v, n)))  # type: ignore[misc]

        found.append((f"{entry.name} · build", 0.0, lambda: self.built(entry)))
        add("restored", entry.counts.restored, entry.call_s)
        found.append((f"{entry.name} · verify", entry.call_s + 4, lambda: self.verify(entry)))
        add("eager", entry.counts.eager, entry.call_s)
        add("trace", entry.counts.trace, entry.call_s)
        for number in range(1, max(entry.counts.warm, entry.counts.bundle) + 1):
            for variant, count in (("warm", entry.counts.warm), ("bundle", entry.counts.bundle)):
                if number <= count:
                    add(variant, number, entry.call_s + 15, first=number)
        add("cold", entry.counts.cold, entry.build_s / 2)
        return found

    def folder(self, entry: Entry) -> Path:
        return self.work / entry.name.replace(":", ".")

    def cache_root(self, entry: Entry) -> Path:
        return self.folder(entry) / "root"

    def release(self) -> str:
        return self.manifest.stem

    def store(self, entry: Entry) -> str:
        return f"file://{self.folder(entry)}/store"

    # --- build, publish, wipe ---------------------------------------------------------------------------------------

    def build(self, entry: Entry) -> None:
        """Builds and publishes one entry, keeps the tuned folder and the bundle, and wipes all else that was built."""
        from cachepipe.adapters.workdir import write_json

        folder = self.folder(entry)
        is_begun = self.is_ours(entry)
        self.need(60.0 if is_begun else entry.build_s)
        if not is_begun:
            if folder.exists():
                folder.rename(self.gone(entry))
                self.sweep(entry)
            folder.mkdir(parents=True)
            (folder / SOURCES).write_text(str(self.journal.facts.get("sources", "")))
        self.cache_root(entry).mkdir(parents=True, exist_ok=True, mode=0o700)
        words = ["build", str(self.manifest), "--only", entry.name, "--store", self.store(entry), "--keep-tuned"]
        words += ["--cache-root", str(self.cache_root(entry)), "--work", str(folder / "work"), "--json"]
        # the table judges latencies: a refused build would leave nothing to measure
        words += ["--report", str(folder / "report"), "--max-latency-ratio", "1000", *self.build_options]
        say(f"{entry.name} · build: about {entry.build_s:.0f} s")
        started = time.monotonic()
        self.command(words, limit_s=self.left())
        seconds = time.monotonic() - started
        for words in (
            ["promote", self.store(entry), "--name", self.release(), "--from", "candidate", "--to", "stable"],
            ["lock", self.store(entry), "--name", self.release(), "--output", str(folder / "lock")],
        ):
            self.command(words)
        self.keep_tuned(folder)
        self.wipe(entry)
        result = {
            "build_s": seconds,
            "statement": self.statement(entry),
            "resumed": is_begun,
        }
        write_json(folder / "built.json", result)
        say(f"{entry.name} · build: done in {seconds:.1f} s")

    @staticmethod
    def keep_tuned(folder: Path) -> None:
        """Moves the tuned folder and the bundle out of the build's work folder, which goes; one that was killed here is gone on with."""
        for kept, name in (("tuned", "tune"), ("bundle", "tune.bundle")):
            if not (folder / kept).exists():
                found = next((folder / "work" / "entries").glob(f"*/{name}"), None)
                if found is None:
                    raise Failed(f"{folder}: the build left no {name}: remove this folder, and it is built anew")
                found.rename(folder / kept)
        shutil.rmtree(folder / "work", ignore_errors=True)

    def wipe(self, entry: Entry) -> None:
        """Removes every folder in which a build, torch, Triton or the driver keeps what was compiled: HOME and TMPDIR as well."""
        for place in (self.cache_root(entry) / self.release(), self.folder(entry) / "home"):
            shutil.rmtree(place, ignore_errors=True)
        (self.folder(entry) / "home" / "tmp").mkdir(parents=True)

    def statement(self, entry: Entry) -> Any:
        from cachepipe.adapters.store import open_store
        from cachepipe.domain.record import to_json
        from cachepipe.workflows.fetch import resolve_ref

        return to_json(resolve_ref(open_store(self.store(entry)), f"{self.release()}@stable").statement)

    def built(self, entry: Entry) -> dict[str, Any]:
        """Returns the build's line: sizes, seconds by step, the tune step's first calls, work by step."""
        folder = self.folder(entry)
        found = self.record(entry)
        statement = found["statement"]
        (record,) = statement["entries"]
        reports = {
            path.stem.rpartition(".")[2]: json.loads(path.read_text()) for path in (folder / "report").glob("*.*.json")
        }
        steps = {step: report for step, report in reports.items() if "shape_buckets" in report}
        return {
            "variant": "build",
            "artifact": statement["artifact"],
            "build_s": found["build_s"],
            "resumed": found["resumed"],
            "shape_buckets": [row["shape_bucket"] for row in record["shape_buckets"]],
            "facts": record["shape_buckets"],
            "tuning": record["tuning"],
            "kinds": record["kinds"],
            "work": {step: report["work"] for step, report in steps.items()},
            "phases": {step: [row["phases"] for row in report["shape_buckets"]] for step, report in steps.items()},
            "bytes": {
                "packed": sum(blob["size_bytes"] for blob in (*statement["packs"], statement["table"])),
                "settled": statement["unpacked_bytes"],
                "tuned": size_of(folder / "tuned"),
                "bundle": (folder / "bundle").stat().st_size,
            },
        }

    # --- fresh processes --------------------------------------------------------------------------------------------

    def first_calls(self, entry: Entry, variant: str, number: int) -> dict[str, Any]:
        """Returns one fresh process's first calls; every variant has the environment of a builder's worker."""
        from cachepipe.adapters.children import compile_workers, worker_environment

        folder = self.folder(entry)
        statement = self.record(entry)["statement"]
        empty = folder / "empty"
        shutil.rmtree(empty, ignore_errors=True)
        empty.mkdir()
        self.wipe(entry)
        job = {
            "variant": "mega-cache bundle" if variant == "bundle" else variant,
            "spec": statement["entries"][0]["spec"],
            "python_path": [str(self.manifest.parent)],
            "bundle": str(folder / "bundle"),
            "save_bundle": False,
        }
        home = folder / "home"
        env, before = worker_environment(home, compile_workers()), []
        if variant == "restored":
            before = [
                *cachepipe(),
                "restore",
                self.store(entry),
                "--name",
                self.release(),
                "--lock",
                str(folder / "lock"),
            ]
            before += ["--strict", "--"]
        else:
            env["TORCHINDUCTOR_CACHE_DIR"] = str(empty / "inductor")
        if variant == "warm":
            shutil.copytree(folder / "tuned", empty, dirs_exist_ok=True)
            env["TRITON_CACHE_DIR"] = str(empty / "triton" / "0")
        if variant in ("warm", "bundle"):  # part of torch's keys: what was built with them hits only with them
            env |= keyed_variables(statement["variables"])
        result = self.child(before, job, folder / "job.json", env)
        shutil.rmtree(empty, ignore_errors=True)
        return {"variant": variant, "round": number, **result}

    def verify(self, entry: Entry) -> dict[str, Any]:
        """Returns what `cachepipe verify` says, restored at another path than built, without any compiler on PATH."""
        self.wipe(entry)
        words = ["verify", str(self.manifest), "--store", self.store(entry), "--lock", str(self.folder(entry) / "lock")]
        words += ["--cache-root", str(self.folder(entry) / "elsewhere"), "--no-compiler", "--files", "--json"]
        words += ["--work", str(self.folder(entry) / "verify")]
        (found,) = json.loads(self.command(words, accepted=(0, 18)))["verifications"]
        others = [text for text in found["violations"] if not text.startswith("stale:")]  # the manifest's other entries
        return {"variant": "verify", "shape_buckets": found["shape_buckets"], "violations": others}

    # --- time and processes -----------------------------------------------------------------------------------------

    def left(self) -> float:
        return self.ends - time.monotonic()

    def need(self, seconds: float) -> None:
        if self.left() < seconds:
            self.wanted_s = max(self.wanted_s, seconds)
            raise Later

    def command(self, words: Sequence[str], accepted: Sequence[int] = (0,), limit_s: float = CHILD_LIMIT_S) -> str:
        """Returns what a cachepipe command printed; a build that outlasts the limit is interrupted and goes on next time."""
        try:
            done = self.processes.run([*cachepipe(), *words], clean_environment(), limit_s)
        except Outlasted as error:
            raise Later if words[0] == "build" else Failed(f"cachepipe {words[0]}: {error}") from None
        if done.code not in accepted:
            raise Failed(f"cachepipe {words[0]}: exit {done.code}\n{done.talk}")
        return done.output

    def child(
        self, before: Sequence[str], job: dict[str, Any], job_file: Path, env: Mapping[str, str]
    ) -> dict[str, Any]:
        """Runs one measured process to its end and returns what it printed."""
        words = [*before, sys.executable, str(REPOSITORY / "ci" / "bench_child.py"), str(job_file)]
        job["started"] = time.monotonic()  # one clock for all processes of a Linux machine
        job_file.write_text(json.dumps(job))
        try:
            done = self.processes.run(words, env, CHILD_LIMIT_S)
        except Outlasted as error:
            raise Failed(f"{job['variant']}: {error}") from None
        if done.code != 0:
            raise Failed(f"{job['variant']}: exit {done.code}\n{done.talk}")
        result: dict[str, Any] = json.loads(done.output.splitlines()[-1])
        return result


def cachepipe() -> list[str]:
    return [sys.executable, "-m", "cachepipe"]


def keyed_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns an artifact's variables without the tools' paths: plain torch has the keys, not our repair."""
    return {name: value for name, value in variables.items() if "{" not in value}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def machine_facts(is_cpu: bool) -> dict[str, Any]:
    """Returns what every line says of the machine and the programs on it."""
    from cachepipe.adapters.gpu import visible_gpus

    gpus = None if is_cpu else visible_gpus(os.environ)
    gpu = gpus.visible[0].name if gpus and gpus.visible else ""
    return {
        "device": gpu or cpu_name(),
        "driver": gpus.driver if gpus else "",
        "cores": len(os.sched_getaffinity(0)),
        "sources": sources_digest(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("torch", "triton", "transformers")},
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def version_of(package: str) -> str:
    """Returns an installed version with its build (`2.11.0+cu130`), or `none`."""
    try:
        if package == "torch":
            from cachepipe.adapters.machine import machine_fingerprint

            return machine_fingerprint(["cpu"], has_compiler_part=False).get("torch") or "none"
        return version(package)
    except PackageNotFoundError:
        return "none"


def say(text: str) -> None:
    print(f"gpu: {text}", file=sys.stderr, flush=True)
