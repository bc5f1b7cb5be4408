"""`ci/bench --store`: what a restore from S3 costs, against the tools that one would use by hand.

Methods, each in a fresh process, alternated round by round, into an empty folder on a memory file system:
  cachepipe          `cachepipe restore --lock … -- true`: every byte verified
  boto3 + tar        boto3's download_file of one .tar.zst, then tar
  s5cmd + tar        `s5cmd cp` of the same, then tar
  cp -r              from a local folder: the floor, no network and no compression
Networks: SeaweedFS on loopback, and files behind a shaper with the profile of S3 (30 ms to the first byte, 85 MB/s per
connection). Wall seconds, CPU seconds of the process and its children, peak memory of the largest of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
for place in (REPOSITORY, REPOSITORY / "ci"):
    if str(place) not in sys.path:
        sys.path.append(str(place))

import bench_tree  # noqa: E402 - ci/ is no package

from cachepipe.adapters.machine import builder_fingerprint  # noqa: E402
from cachepipe.adapters.packs import pack_tree, write_blob  # noqa: E402
from cachepipe.domain.index import timestamp  # noqa: E402
from cachepipe.domain.limits import LIMITS  # noqa: E402
from cachepipe.domain.lock import FORMAT as LOCK_FORMAT  # noqa: E402
from cachepipe.domain.lock import Lock, lock_bytes  # noqa: E402
from cachepipe.domain.ulid import ulid  # noqa: E402
from cachepipe.workflows.publish import PackedArtifact, publish  # noqa: E402
from tests.support import s3, seaweed  # noqa: E402
from tests.support.artifacts import make_artifact  # noqa: E402
from tests.support.fault_proxy import FaultProxy  # noqa: E402

SIZES_MB = (10, 370, 1000)
DELAY_MS, MB_PER_S = 30, 85
METHODS = ("cachepipe", "boto3 + tar", "s5cmd + tar", "cp -r")
_BOTO3 = """
import sys, subprocess, boto3
from botocore import UNSIGNED
from botocore.config import Config
endpoint, s3_bucket, key, target, is_unsigned = sys.argv[1:]
config = Config(signature_version=UNSIGNED if is_unsigned == "1" else "s3v4", s3={"addressing_style": "path"})
client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
client.download_file(s3_bucket, key, target + ".tar.zst")
subprocess.run(["tar", "--zstd", "-xf", target + ".tar.zst", "-C", target], check=True)
"""


class Cost(NamedTuple):
    wall_s: float
    cpu_s: float
    peak_mib: float


@dataclass(frozen=True)
class Network:
    name: str
    endpoint: str
    environment: Mapping[str, str]
    is_unsigned: bool


@dataclass(frozen=True)
class Subject:
    """One tree, published."""

    size_mb: int
    tree: Path
    tar_key: str
    prefix: str
    lock: Path
    facts: Mapping[str, Any]


_LAUNCHER = """
import json, os, sys, time
began = time.monotonic()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
wall_s = time.monotonic() - began
print(json.dumps([status, wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]), file=sys.stderr)
"""
"""Why: the peak memory of a process starts at that of its parent, and the bench is large."""


def measured(command: Sequence[str], env: Mapping[str, str]) -> Cost:
    """Runs a command in a fresh process and returns its cost, children included."""
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command]
    done = subprocess.run(launcher, env=dict(env), capture_output=True, text=True, check=True)
    *said, last = done.stderr.splitlines()
    status, *cost = json.loads(last)
    if status != 0 or any("outcome=cold" in line for line in said):
        sys.exit(f"bench: {' '.join(command)[:300]}: status {status}\n{said[-20:]}")
    return Cost(*cost)


def command_of(method: str, subject: Subject, network: Network, target: Path) -> list[str]:
    scripts = Path(sys.executable).parent
    if method == "cp -r":
        return ["cp", "-r", str(subject.tree), str(target / "tree")]
    if method == "cachepipe":
        script = scripts / "cachepipe"
        own = [str(script)] if script.exists() else [sys.executable, "-m", "cachepipe"]
        query = f"endpoint={network.endpoint}&unsigned={str(network.is_unsigned).lower()}"
        url = f"s3://{seaweed.S3_BUCKET}/{subject.prefix}?{query}"
        words = ["restore", url, "--lock", str(subject.lock), "--dest", str(target / "release"), "--strict"]
        return [*own, *words, "--", "true"]
    if method == "boto3 + tar":
        words = [network.endpoint, seaweed.S3_BUCKET, subject.tar_key, str(target), str(int(network.is_unsigned))]
        return [sys.executable, "-c", _BOTO3, *words]
    sign = "--no-sign-request" if network.is_unsigned else "--log=error"
    copy = f"{scripts}/s5cmd --endpoint-url {network.endpoint} {sign} cp"
    copy += f" s3://{seaweed.S3_BUCKET}/{subject.tar_key} {target}/tree.tar.zst"
    return ["sh", "-c", f"{copy} && tar --zstd -xf {target}/tree.tar.zst -C {target}"]


# --- preparation -------------------------------------------------------------------------------------------------------


def prepare(work: Path, size_mb: int, server: seaweed.Seaweed, shaped: Path) -> Subject:
    """Makes and publishes a tree; the shaper's folder gets the same objects."""
    kernels, tree = work / "kernels", work / f"tree-{size_mb}"
    if not kernels.exists():
        say("compiling kernels")
        bench_tree.compile_kernels(kernels)
    if not tree.exists():
        say(f"making a tree of {size_mb} MB")
        bench_tree.make_tree(tree, size_mb, kernels)
    tar = work / f"tree-{size_mb}.tar.zst"
    if not tar.exists():
        subprocess.run(["tar", "--zstd", "-cf", str(tar), "-C", str(tree), "."], check=True)
    os.environ.update(s3.environment())
    prefix = f"bench-{size_mb}"
    url = f"s3://{seaweed.S3_BUCKET}/{prefix}?endpoint={server.endpoint}"
    packed = pack(work / f"pack-{size_mb}", tree, f"bench-{size_mb}")
    store, statement = s3.opened(url), packed.statement
    began, cpu = time.monotonic(), time.process_time()
    row = publish(store, statement.release, "stable", packed, datetime.now(timezone.utc))
    seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
    sent = sum(blob.size_bytes for blob in statement.packs)
    lock = work / f"{prefix}.lock"
    lock.write_bytes(lock_bytes(Lock(LOCK_FORMAT, statement.release, "stable", 1, (row,), statement.root)))
    tar_key = f"{prefix}.tar.zst"
    store_tar(server, tar_key, tar)
    mirror(url, shaped / seaweed.S3_BUCKET / prefix)
    shutil.copyfile(tar, shaped / seaweed.S3_BUCKET / tar_key)
    facts = {
        "files": statement.files,
        "raw_mb": statement.unpacked_bytes / 1e6,
        "packs": len(statement.packs),
        "packs_mb": sent / 1e6,
        "tar_mb": tar.stat().st_size / 1e6,
        "publish_s": seconds,
        "publish_cpu_s": cpu_s,
        "publish_mb_per_s": sent / 1e6 / seconds,
    }
    say(f"published {sent / 1e6:.0f} MB in {seconds:.2f} s")
    return Subject(size_mb, tree, tar_key, prefix, lock, facts)


def pack(folder: Path, tree: Path, name: str) -> PackedArtifact:
    """Returns an artifact of the tree that fits this machine."""
    shutil.rmtree(folder, ignore_errors=True)
    blobs = folder / "blobs"
    blobs.mkdir(parents=True)
    root = f"/var/cache/cachepipe/{name}"
    paths = [str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()]
    packed, now = pack_tree(tree, dict.fromkeys(paths, (0,)), root, blobs), datetime.now(timezone.utc)
    statement = replace(
        make_artifact(folder).statement,
        artifact=ulid(now, os.urandom(10)),
        release=name,
        root=root,
        created_at=timestamp(now),
        fingerprint=builder_fingerprint("cpu", has_native_code=False).parts,
        packs=packed.packs,
        table=packed.table_blob,
        explain=write_blob(b"{}\n", blobs, LIMITS.explain_raw_bytes),
        files=len(packed.table.files),
        unpacked_bytes=packed.table.unpacked_bytes,
    )
    return PackedArtifact(statement, blobs)


def store_tar(server: seaweed.Seaweed, key: str, tar: Path) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=server.endpoint)
    client.upload_file(str(tar), seaweed.S3_BUCKET, key)


def mirror(url: str, folder: Path) -> None:
    store = s3.opened(url)
    for key in store.list(""):
        data = store.get(key, 1 << 30)
        assert data is not None
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


@contextmanager
def shaper(root: Path) -> Iterator[str]:
    command = [sys.executable, str(REPOSITORY / "ci" / "s3_shaper.py"), str(root), str(DELAY_MS), str(MB_PER_S)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


# --- measuring ---------------------------------------------------------------------------------------------------------


def rounds_of(subject: Subject, networks: Sequence[Network], rounds: int, target_root: Path) -> dict[str, list[Cost]]:
    """Returns method and network → costs; methods alternate, so that a busy moment hits all of them."""
    found: dict[str, list[Cost]] = {}
    for number in range(rounds):
        for network in networks:
            for method in METHODS:
                if method == "cp -r" and network is not networks[0]:
                    continue
                target = target_root / f"{number}"
                target.mkdir(mode=0o700)
                kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
                env = {**kept, **network.environment, "PYTHONPATH": str(REPOSITORY)}
                command = command_of(method, subject, network, target)
                found.setdefault(f"{method}, {network.name}", []).append(measured(command, env))
                shutil.rmtree(target)
        say(f"{subject.size_mb} MB: round {number + 1} of {rounds}")
    return found


def first_request_s(subject: Subject, server: seaweed.Seaweed, rounds: int, target_root: Path) -> list[float]:
    """Returns seconds from the spawn of a restore to the first connection that a proxy accepts."""
    found = []
    for number in range(rounds):
        with FaultProxy(server.ports[0]) as proxy:
            network = Network("proxy", proxy.url, s3.environment(), is_unsigned=False)
            target = target_root / f"first-{number}"
            target.mkdir(mode=0o700)
            command = command_of("cachepipe", subject, network, target)
            env = {"PATH": os.environ["PATH"], **network.environment, "PYTHONPATH": str(REPOSITORY)}
            began = time.monotonic()
            subprocess.run(command, env=env, check=True, capture_output=True)
            found.append(proxy.accepted[0] - began)
            shutil.rmtree(target)
    return found


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(values) for values in zip(*costs, strict=True)))


def table_of(results: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the table, with the verdicts at 370 MB."""
    lines = [f"{'':38} {'wall s':>8} {'CPU s':>8} {'MiB':>8}"]
    for size, found in results["sizes"].items():
        facts = found["facts"]
        lines.append(
            f"{size} MB: {facts['files']} files, {facts['packs']} packs of {facts['packs_mb']:.0f} MB together"
        )
        for name, runs in found["runs"].items():
            cost = median([Cost(*run) for run in runs])
            lines.append(f"  {name:36} {cost.wall_s:8.2f} {cost.cpu_s:8.2f} {cost.peak_mib:8.0f}")
        lines.append(f"  publish: {facts['publish_mb_per_s']:.0f} MB/s, {facts['publish_cpu_s']:.2f} CPU s")
    lines.append(f"first request after {statistics.median(results['first_request_s']) * 1e3:.0f} ms")
    return lines + verdicts(results)


def verdicts(results: Mapping[str, Any]) -> list[str]:
    found = results["sizes"].get("370")
    if found is None:
        return []
    cost = {name: median([Cost(*run) for run in runs]) for name, runs in found["runs"].items()}
    lines = []
    for network in ("loopback", "shaped"):
        own = cost[f"cachepipe, {network}"]
        for other in ("boto3 + tar", "s5cmd + tar"):
            ratio = cost[f"{other}, {network}"].wall_s / own.wall_s
            lines.append(verdict(f"370 MB, {network}: {other} ÷ cachepipe", f"{ratio:.2f}", ">= 2.5", ratio >= 2.5))
        lines.append(verdict(f"370 MB, {network}: CPU", f"{own.cpu_s:.2f} s", "<= 1.2 s", own.cpu_s <= 1.2))
    every = [Cost(*run) for size in results["sizes"].values() for key, runs in size["runs"].items() for run in runs
             if key.startswith("cachepipe")]  # fmt: skip
    peak = max(run.peak_mib for run in every)
    lines.append(verdict("peak memory, every size", f"{peak:.0f} MiB", "<= 200 MiB", peak <= 200))
    first = statistics.median(results["first_request_s"])
    lines.append(verdict("first request", f"{first * 1e3:.0f} ms", "<= 150 ms", first <= 0.15))
    speed = found["facts"]["publish_mb_per_s"]
    lines.append(verdict("publish, 370 MB", f"{speed:.0f} MB/s", ">= 100 MB/s", speed >= 100))
    return lines


def verdict(what: str, value: str, target: str, is_met: bool) -> str:
    return f"  {'met' if is_met else 'MISSED':7} {what}: {value} ({target})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="ci/bench --store", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes per method [default: 5]")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES_MB)), help="megabytes, separated by commas")
    parser.add_argument("--work", type=Path, default=REPOSITORY / ".work" / "bench-store", help="work folder, kept")
    parser.add_argument("--target", type=Path, default=Path("/dev/shm"), help="memory file system that allows exec")
    parser.add_argument("--output", type=Path, help="file for the results; default: printed only")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    target_root = options.target / f"cachepipe-bench-{os.getpid()}"
    target_root.mkdir(mode=0o700)
    shaped = work / "shaped"
    shutil.rmtree(shaped, ignore_errors=True)
    server = seaweed.start()
    try:
        with shaper(shaped) as slow:
            results = run(work, shaped, server, slow, options, target_root)
    finally:
        server.stop()
        shutil.rmtree(target_root, ignore_errors=True)
    print("\n".join(table_of(results)))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def run(
    work: Path, shaped: Path, server: seaweed.Seaweed, slow: str, options: argparse.Namespace, target_root: Path
) -> dict[str, Any]:
    networks = [
        Network("loopback", server.endpoint, s3.environment(), is_unsigned=False),
        Network("shaped", slow, s3.environment(), is_unsigned=True),
    ]
    results: dict[str, Any] = {"sizes": {}, "date": datetime.now(timezone.utc).strftime("%Y-%m-%d")}
    results["machine"] = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": sys.version.split()[0],
    }
    results["profile"] = {"delay_ms": DELAY_MS, "mb_per_s_and_connection": MB_PER_S}
    for size in (int(text) for text in options.sizes.split(",")):
        subject = prepare(work, size, server, shaped)
        runs = rounds_of(subject, networks, options.rounds, target_root)
        results["sizes"][str(size)] = {"facts": subject.facts, "runs": runs}
        if "first_request_s" not in results:
            results["first_request_s"] = first_request_s(subject, server, options.rounds, target_root)
    return results


if __name__ == "__main__":
    main()
