"""`cachepipe restore` started by hostile hands: closed streams, full pipes, odd masks, odd bytes. The service starts."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import hanging
from tests.support.restoring import (
    Published,
    Ran,
    command,
    environment,
    files_below,
    publish_release,
    restore_words,
    run_restore,
    service_environment,
)

STARTED = command(["echo", "started"])
REDIRECTIONS = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-", "all": "<&- >&- 2>&-"}


@pytest.fixture
def demo(tmp_path: Path) -> Published:
    return publish_release(tmp_path)


def words(release: Published, *more: str) -> tuple[str, ...]:
    return (release.store.url, "--name", release.name, *more)


def run_in_shell(base: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script], env=environment(base), cwd="/", capture_output=True, text=True, timeout=60, check=False
    )


# --- standard streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", REDIRECTIONS)
def test_a_closed_stream_takes_no_line_of_ours_into_a_file_and_stays_closed(
    tmp_path: Path, demo: Published, closed: str
) -> None:
    look = "import os\nseen = []\nfor n in range(3):\n    try:\n        os.fstat(n)\n        seen.append(n)\n    except OSError:\n        pass\n"
    look += f"import pathlib\npathlib.Path('{tmp_path}/seen').write_text(repr(seen))\n"
    line = shlex.join(restore_words(*words(demo), "--", sys.executable, "-S", "-c", look))
    ran = run_in_shell(tmp_path, f"{line} {REDIRECTIONS[closed]}")
    assert ran.returncode == 0
    closed_ones = {"stdin": {0}, "stdout": {1}, "stderr": {2}, "all": {0, 1, 2}}[closed]
    assert set(eval((tmp_path / "seen").read_text())) == {0, 1, 2} - closed_ones
    assert files_below(demo.root) == demo.restored_bytes(demo.root)
    assert Path(demo.root, ".lease").read_bytes() == b""
    assert (tmp_path / "cache/.demo.lock").read_bytes() == b""


@pytest.mark.parametrize("is_disabled", [False, True])
def test_a_command_that_is_not_there_exits_127_also_with_stderr_closed(
    tmp_path: Path, demo: Published, is_disabled: bool
) -> None:
    line = shlex.join(restore_words(*words(demo), "--", "/no/such/command"))
    ran = run_in_shell(tmp_path, f"{'CACHEPIPE_DISABLE=1 ' if is_disabled else ''}{line} 2>&-; echo $?")
    assert ran.stdout == "127\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("is_disabled", [False, True])
def test_a_full_pipe_that_nobody_reads_holds_no_service(
    tmp_path: Path, demo: Published, stream: str, is_disabled: bool
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    env = environment(tmp_path, **({"CACHEPIPE_DISABLE": "1"} if is_disabled else {}))
    argv = restore_words(*words(demo, "--json", "--deadline", "5"), "--", "touch", str(tmp_path / "started"))
    kept = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: writing}
    try:
        ran = subprocess.run(argv, env=env, cwd="/", timeout=7, check=False, **kept)  # type: ignore[call-overload]
    finally:
        os.close(reading)
        os.close(writing)
    assert ran.returncode == 0
    assert (tmp_path / "started").exists()


def test_a_reader_of_the_json_that_went_away_changes_no_exit_code(tmp_path: Path, demo: Published) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv = restore_words(*words(demo, "--json"))
    ran = subprocess.run(
        argv, env=environment(tmp_path), cwd="/", stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert ran.returncode == 0
    assert len(ran.stderr.splitlines()) == 1


# --- command lines that cannot be parsed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "false", "no", "off"])
def test_strict_that_is_switched_off_keeps_no_service_down_when_an_option_is_unknown(
    tmp_path: Path, demo: Published, value: str
) -> None:
    env = environment(tmp_path, CACHEPIPE_RESTORE_STRICT=value)
    ran = run_restore(tmp_path, *words(demo, "--no-such-option"), *STARTED, env=env)
    assert (ran.code, ran.out, ran.line["outcome"]) == (0, "started\n", "cold")


def test_an_unknown_option_leaves_the_known_flags_in_force(tmp_path: Path, demo: Published) -> None:
    ran = run_restore(tmp_path, *words(demo, "--no-attach", "--no-such-option"), *command())
    assert "CACHEPIPE_ATTACH" not in service_environment(ran)
    told = run_restore(tmp_path, *words(demo, "--json", "--no-such-option"))
    assert told.code == 2
    assert '"exit_code": 2' in told.out
    env = environment(tmp_path, CACHEPIPE_RESTORE_STRICT="1")
    assert run_restore(tmp_path, *words(demo, "--no-such-option"), *STARTED, env=env).code == 2


def test_a_relative_folder_below_a_working_folder_that_is_gone_is_a_mistake_of_usage(
    tmp_path: Path, demo: Published
) -> None:
    line = shlex.join(restore_words(*words(demo, "--dest", "here"), *STARTED))
    ran = run_in_shell(tmp_path, f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && {line}")
    assert ran.stdout == "started\n"
    assert "working folder that is gone" in ran.stderr
    assert "this is a bug" not in ran.stderr


def test_a_relative_state_folder_is_the_same_one_for_a_service_that_changes_its_own(
    tmp_path: Path, demo: Published
) -> None:
    ran = run_restore(tmp_path, *words(demo, "--state-dir", "state/../tmp"), *command())
    assert service_environment(ran)["CACHEPIPE_STATE_DIR"] == "/tmp"


# --- files that are written ----------------------------------------------------------------------------------------------


def test_an_env_file_never_replaces_a_device_or_a_pipe(tmp_path: Path, demo: Published) -> None:
    os.mkfifo(tmp_path / "pipe")
    ran = run_restore(tmp_path, *words(demo, "--env-file", str(tmp_path / "pipe")), *STARTED)
    assert (ran.code, ran.out) == (0, "started\n")
    assert "not a regular file" in ran.err
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert run_restore(tmp_path, *words(demo, "--env-file", str(tmp_path / "pipe"))).code == 2


@pytest.mark.parametrize("is_disabled", [False, True])
def test_an_env_file_on_a_mount_that_hangs_holds_no_service(tmp_path: Path, demo: Published, is_disabled: bool) -> None:
    path = tmp_path / "dead" / "variables"
    path.parent.mkdir()
    extra = {"CACHEPIPE_DISABLE": "1"} if is_disabled else {}
    env = environment(tmp_path, **hanging.variables(), HANG_AT=str(path), **extra)
    given = ("--deadline", "2", "--env-file", str(path))
    ran = run_restore(tmp_path, *words(demo, *given), *STARTED, env=env)
    assert (ran.code, ran.out) == (0, "started\n")
    assert ran.seconds < 2 + 2
    assert "its file system does not answer" in ran.err
    if not is_disabled:
        assert ran.line["outcome"] == "restored"
        assert run_restore(tmp_path, *words(demo, *given), env=env).code == 2


def test_a_folder_with_a_line_break_puts_no_second_variable_into_an_env_file(tmp_path: Path, demo: Published) -> None:
    path = tmp_path / "variables"
    dest = f"{tmp_path}/a\nLD_PRELOAD=x/demo"
    run_restore(tmp_path, *words(demo, "--dest", dest, "--env-file", str(path)))
    assert "LD_PRELOAD" not in path.read_text()
    env = environment(tmp_path, TMPDIR=f"{tmp_path}/a\nLD_PRELOAD=x")
    ran = run_restore(tmp_path, "--name", "demo", "--env-file", str(tmp_path / "other"), *STARTED, env=env)
    assert ran.out == "started\n"
    assert not (tmp_path / "other").exists() or "\nLD_PRELOAD" not in (tmp_path / "other").read_text()


def test_the_kill_switch_leaves_no_variables_of_an_earlier_start_in_the_env_file(
    tmp_path: Path, demo: Published
) -> None:
    path = tmp_path / "variables"
    run_restore(tmp_path, *words(demo, "--env-file", str(path)))
    assert "TORCHINDUCTOR_CACHE_DIR" in path.read_text()
    env = environment(tmp_path, CACHEPIPE_DISABLE="1")
    for given in (["--env-file", str(path)], [f"--env-file={path}"]):
        path.write_text("TORCHINDUCTOR_CACHE_DIR=/old\n")
        assert run_restore(tmp_path, *words(demo, *given), *STARTED, env=env).out == "started\n"
        assert path.read_bytes() == b""


@pytest.mark.parametrize("umask", ["000", "777"])
def test_the_umask_opens_nothing_closes_nothing_and_is_the_services_own(
    tmp_path: Path, demo: Published, umask: str
) -> None:
    line = shlex.join(restore_words(*words(demo), "--", "bash", "-c", "umask"))
    ran = run_in_shell(tmp_path, f"umask {umask} && {line} && {line}")
    assert ran.stdout == f"0{umask}\n" * 2
    outcomes = [Ran(0, "", text, 0.0).line["outcome"] for text in ran.stderr.splitlines()]
    assert outcomes == ["restored", "present"]
    own = [tmp_path / "cache/.demo.lock", *Path(demo.root, ".cachepipe").rglob("*"), Path(demo.root, ".lease")]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in own}
    assert all(mode & 0o022 == 0 and mode & 0o600 == 0o600 for mode in modes)


# --- bytes that are no UTF-8 ---------------------------------------------------------------------------------------------


def test_bytes_that_are_no_utf8_in_variables_and_folders_cost_no_warm_start(tmp_path: Path, demo: Published) -> None:
    env = environment(tmp_path, CXX=os.fsdecode(b"\xff"))
    dest = os.fsdecode(os.fsencode(tmp_path) + b"/\xff/demo")
    ran = run_restore(tmp_path, *words(demo, "--dest", dest), *STARTED, env=env)
    assert (ran.out, ran.line["outcome"]) == ("started\n", "restored")
    assert "not printable UTF-8" in ran.line["reason"]
    alone = run_restore(tmp_path, *words(demo, "--dest", dest))
    assert (alone.code, alone.line["outcome"]) == (17, "refused")


def test_a_restore_that_runs_out_of_memory_says_so(tmp_path: Path, demo: Published) -> None:
    line = shlex.join(restore_words(*words(demo), *STARTED))
    for kib in (40_000, 60_000, 80_000):
        ran = run_in_shell(tmp_path, f"ulimit -v {kib}; {line}")
        assert "this is a bug" not in ran.stderr
        # below some size the interpreter itself cannot start
        assert ran.stdout == "started\n" or "cachepipe" not in ran.stderr


def test_an_interrupt_shows_no_traceback_of_ours(tmp_path: Path, demo: Published) -> None:
    # the import of the entrypoint's modules is the longest part of a start; a pipe tells that it has begun
    code = (
        "import builtins, os, signal, sys\nreal = builtins.__import__\n"
        "def hooked(name, *rest):\n"
        "    if name == 'cachepipe.workflows.serve': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = hooked\nfrom cachepipe.entrypoint import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    argv = [sys.executable, "-c", code, "restore", *words(demo), *STARTED]
    ran = subprocess.run(argv, env=environment(tmp_path), cwd="/", capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, "", "")
