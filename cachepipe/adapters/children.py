"""Child processes with a time limit, a private environment, and no survivors."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cachepipe.adapters import guard
from cachepipe.domain.limits import GIB
from cachepipe.errors import DeadlineError, Interrupted, Terminated

LINGER_S = 5.0
"""A child whose result is written may take this long to exit; pools of compile workers hang at exit (field case I1)."""
ENDING_S = 2 * guard.GRACE_S + 4.0
_POLL_S = 0.1
_LINE_BYTES = 1 << 20
_MAX_WORKERS = 32

_ALLOWED = (
    "PATH",
    "LANG",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "SSL_CERT_FILE",
)
_WEIGHT_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TORCH_HOME")
"""Factories may load weights from a folder that CI filled; HOME is private, so the default places are out of sight."""


@dataclass(frozen=True)
class Command:
    """What to run and within which bounds."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    timeout_s: float
    log: Path
    """Gets the child's stderr, appended."""
    result: Path | None = None
    """Once this file is there, the child has `LINGER_S` to exit and is ended then, without an error."""


def run_child(command: Command, on_line: Callable[[str], None]) -> int:
    """Returns the child's status (negative: the signal) when neither it nor any of its descendants is left.

    Args:
        command: see `Command`.
        on_line: called in this thread with every line of the child's stdout.

    Raises:
        DeadlineError: ended after `timeout_s` without a result.
        Interrupted, Terminated: SIGINT or SIGTERM came; everything is ended as well.
    """
    hold_read, hold_write = os.pipe()
    with _interruptible(), open(command.log, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(hold_read), *command.argv],
            env=dict(command.env),
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=(hold_read,),
            start_new_session=True,  # a Ctrl-C of the terminal reaches the builder alone, which ends the tree in order
        )
        os.close(hold_read)
        try:
            _follow(process, command, on_line)
        except KeyboardInterrupt:
            raise Interrupted("interrupted: the worker was ended") from None
        finally:
            os.close(hold_write)
            wait_for_end(process)
    return process.returncode


def _follow(process: subprocess.Popen[bytes], command: Command, on_line: Callable[[str], None]) -> None:
    """Passes lines on until the guard has ended; raises DeadlineError past the limit."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    deadline = time.monotonic() + command.timeout_s
    linger: float | None = None
    pending = b""
    is_open = True
    while process.poll() is None or is_open:
        if is_open and select.select([fd], [], [], _POLL_S)[0]:
            data = os.read(fd, 1 << 16)
            is_open = bool(data)
            pending = _split(pending + data, on_line)
        elif not is_open:
            time.sleep(_POLL_S)
        elif process.poll() is not None:
            break
        now = time.monotonic()
        if linger is None and command.result is not None and command.result.exists():
            linger = now + LINGER_S
        if linger is not None and now > linger:
            break
        if linger is None and now > deadline:
            raise DeadlineError(f"ended after {command.timeout_s:.0f} s without a result")
    _split(pending + b"\n", on_line)


def _split(data: bytes, on_line: Callable[[str], None]) -> bytes:
    *lines, rest = data.split(b"\n")
    for line in lines:
        if line:
            on_line(line.decode(errors="replace"))
    return rest if len(rest) < _LINE_BYTES else b""


def wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Waits until a guard is gone, at most as long as it may take; then it and all below it are killed."""
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        for pid in (*guard.descendants(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the children as SIGINT does; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated("terminated: the worker was ended")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def last_lines(log: Path, count: int = 12) -> str:
    """Returns the last lines of a log, indented, for quotation in an error."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    return "".join(f"\n    {line[:300]}" for line in lines[-count:])


def worker_environment(home: Path, workers: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the whole environment of a worker: an allow-list, never a secret, never what leaks into torch's keys.

    Args:
        home: private folder; HOME, and TMPDIR below it.
        workers: torch's compile processes.
        extra: added last, e.g. the cache variables.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _ALLOWED or name in _WEIGHT_FOLDERS or name.startswith("LC_")
    }
    temporary = home / "tmp"
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = {
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": str(workers),
    }
    # All ranks of a service see one GPU as cuda:0, and the index is in torch's keys: the builder sees one as well.
    if visible := inherited.get("CUDA_VISIBLE_DEVICES"):
        own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    return {**inherited, **own, **(extra or {})}


def compile_workers(root: Path = Path("/")) -> int:
    """Returns how many compile processes this container can feed: 1 to 32, by CPUs, CPU quota and memory limit.

    Args:
        root: where /proc and /sys are looked up.

    Source: torch counts the host's CPUs (field case I3). A g++ or ptxas takes up to 1 GiB; the worker itself 2 GiB.
    """
    cpus = float(len(os.sched_getaffinity(0)))
    quotas, memories = _cgroup_limits(root)
    limit_bytes = min([*memories, 1 << 62])
    by_memory = (limit_bytes - 2 * GIB) // GIB
    return int(max(1, min(cpus, *quotas, by_memory, _MAX_WORKERS)))


def _cgroup_limits(root: Path) -> tuple[list[float], list[int]]:
    """Returns every CPU quota (in CPUs) and memory limit (in bytes) of this process's cgroups, up to the top."""
    quotas: list[float] = [_MAX_WORKERS]
    memories: list[int] = []
    for folder in _cgroup_folders(root):
        quota = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
            quotas.append(int(quota[0]) / int(quota[1]))
        memory = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        if memory and memory[0].isdigit():
            memories.append(int(memory[0]))
    return quotas, memories


def _cgroup_folders(root: Path) -> Iterator[Path]:
    top = root / "sys/fs/cgroup"
    try:
        rows = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        rows = []
    for row in rows:
        _, controllers, path = row.split(":", 2)
        base = top / controllers if controllers else top
        folder = base / path.lstrip("/")
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(base)))
    yield from (top, top / "cpu", top / "memory")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
