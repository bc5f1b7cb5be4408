from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachepipe.adapters import children, guard
from cachepipe.adapters.children import Command, compile_workers, last_lines, run_child, worker_environment
from cachepipe.errors import DeadlineError

FORK_AND_SLEEP = """
import os, subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import os,signal,time; signal.signal(15, signal.SIG_IGN); "
    "print(os.getpid(), flush=True); time.sleep(600)"], start_new_session=True)
print(os.getpid(), flush=True)
"""


def command(tmp_path: Path, code: str, timeout_s: float = 60, result: Path | None = None) -> Command:
    environment = worker_environment(tmp_path / "home", 1)
    argv = [sys.executable, "-I", "-c", code]
    return Command(argv, environment, tmp_path, timeout_s, tmp_path / "log", result)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_lines_of_stdout_are_passed_on_and_stderr_is_logged(tmp_path: Path) -> None:
    lines: list[str] = []
    status = run_child(
        command(tmp_path, "import sys; print('one'); print('two'); print('talk', file=sys.stderr)"), lines.append
    )
    assert (status, lines) == (0, ["one", "two"])
    assert last_lines(tmp_path / "log") == "\n    talk"


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", -11)])
def test_the_status_is_the_childs_own(tmp_path: Path, code: str, status: int) -> None:
    assert run_child(command(tmp_path, code), print) == status


def test_case_i1_a_grandchild_in_its_own_session_does_not_outlive_the_child(tmp_path: Path) -> None:
    lines: list[str] = []
    code = FORK_AND_SLEEP + "import time; time.sleep(0.3)"
    begin = time.monotonic()
    assert run_child(command(tmp_path, code), lines.append) == 0
    assert time.monotonic() - begin < 10
    assert len(lines) == 2 and not any(is_alive(int(line)) for line in lines)


def test_case_i1_a_child_that_hangs_at_exit_after_its_result_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LINGER_S", 0.2)
    result = tmp_path / "result"
    code = (
        f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(result)!r}, 'w').close(); time.sleep(600)"
    )
    begin = time.monotonic()
    assert run_child(command(tmp_path, code, result=result), print) == -signal.SIGKILL
    assert time.monotonic() - begin < 10


def test_case_i1_a_hung_child_is_ended_at_its_limit_with_all_its_children(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(DeadlineError):
        run_child(command(tmp_path, FORK_AND_SLEEP + "time.sleep(600)", timeout_s=1.0), lines.append)
    assert len(lines) == 2 and not any(is_alive(int(line)) for line in lines)


BUILDER = """
import sys
from pathlib import Path
from cachepipe.adapters.children import Command, run_child, worker_environment
from cachepipe.errors import Interrupted
folder = Path(sys.argv[1])
try:
    run_child(Command([sys.executable, "-c", sys.argv[2]], worker_environment(folder / "home", 1), folder, 60,
                      folder / "log"), lambda line: print(line, flush=True))
except Interrupted as error:
    sys.exit(error.exit_code)
"""


def start_builder(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    code = FORK_AND_SLEEP + "time.sleep(600)"
    builder = subprocess.Popen([sys.executable, "-c", BUILDER, str(tmp_path), code], stdout=subprocess.PIPE, text=True)
    assert builder.stdout is not None
    return builder, [int(builder.stdout.readline()) for _ in range(2)]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 15
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)


def test_case_i1_kill_9_of_the_builder_leaves_no_orphan(tmp_path: Path) -> None:
    builder, pids = start_builder(tmp_path)
    with builder:
        builder.kill()
    wait_until_gone(pids)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_case_i1_an_interrupted_builder_ends_everything(tmp_path: Path, number: signal.Signals, code: int) -> None:
    builder, pids = start_builder(tmp_path)
    with builder:
        builder.send_signal(number)
    assert builder.returncode == code
    assert not any(is_alive(pid) for pid in pids)


def test_descendants_are_found_through_generations() -> None:
    assert os.getpid() in guard.descendants(os.getppid())


def test_secrets_and_user_settings_do_not_reach_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PYTHONPATH", "TORCH_COMPILE_DEBUG", "CXX"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    environment = worker_environment(tmp_path / "home", 4, {"TRITON_CACHE_DIR": "/r/triton/0"})
    allowed = {"HOME", "TMPDIR", "PYTHONNOUSERSITE", "PYTHONUNBUFFERED", "TORCHINDUCTOR_COMPILE_THREADS"}
    assert set(environment) <= allowed | {"LC_ALL", "TRITON_CACHE_DIR", *children._ALLOWED, *children._WEIGHT_FOLDERS}
    assert environment["HOME"] == str(tmp_path / "home") and Path(environment["TMPDIR"]).is_dir()
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["LC_ALL"] == "C.UTF-8" and environment["TORCHINDUCTOR_COMPILE_THREADS"] == "4"


def fake_root(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "workers"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{6 << 30}\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{1 << 30}\n"}, 1),
        ({"proc/self/cgroup": "4:cpu:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000",
          "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, 2),
        ({"proc/self/cgroup": "4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{7 << 30}"}, 5),
        ({}, 16),
    ],
)  # fmt: skip
def test_case_i3_worker_count_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert compile_workers(fake_root(tmp_path, files)) == workers
