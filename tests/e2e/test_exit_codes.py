"""T-EXIT: every exit code of the README's table through the real command line: exact code, a hint on stderr, JSON on stdout."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachepipe.domain.layout import index_key
from cachepipe.errors import CachepipeError, Interrupted
from tests.support.authority import write_policy
from tests.support.manifests import small_manifest, write_manifest
from tests.support.release import REPOSITORY
from tests.support.restoring import Published, environment, publish_release, restore_words
from tests.support.silent_store import URL, silent_store

CLI = [sys.executable, "-m", "cachepipe"]


def run(base: Path, argv: list[str], before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    line = f"{before + '; ' if before else ''}exec {shlex.join(argv)}"
    return subprocess.run(
        ["bash", "-c", line],
        env={**environment(base), **env},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def demo(tmp_path: Path) -> Published:
    return publish_release(tmp_path)


def strict(demo: Published, *more: str) -> list[str]:
    return restore_words(demo.store.url, "--name", "demo", "--strict", "--json", *more)


def no_other_place(demo: Published, base: Path) -> list[str]:
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    return strict(demo, "--dest", f"{base}/open/demo")


def other_machine(base: Path, demo: Published) -> list[str]:
    parts = tuple(replace(p, value="9.9.9") if p.name == "torch" else p for p in demo.statement.fingerprint)
    other = publish_release(base, "other", fingerprint=parts)
    return restore_words(other.store.url, "--name", "other", "--strict", "--json")


def quarantined(base: Path, demo: Published) -> list[str]:
    for number in range(2):
        mark = base / "state/attempts" / demo.row.statement / f"s{number}.1"
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps({"pid": 1, "time": int(time.time())}))
    return strict(demo, "--state-dir", str(base / "state"))


def cut_index(base: Path, demo: Published) -> list[str]:
    os.truncate(Path(demo.store.root, index_key("demo", "stable", 1)), 50)
    return strict(demo)


RESTORES: dict[int, Callable[[Path, Published], list[str]]] = {
    2: lambda base, demo: strict(demo, "--wat"),
    12: lambda base, demo: restore_words(demo.store.url, "--name", "absent", "--strict", "--json"),
    13: cut_index,
    14: lambda base, demo: strict(demo, "--trust", write_policy(base / "p.json")),
    15: lambda base, demo: restore_words("gopher://x", "--name", "demo", "--strict", "--json"),
    17: lambda base, demo: no_other_place(demo, base),
    18: quarantined,
    19: other_machine,
    21: lambda base, demo: restore_words(URL, "--name", "demo", "--strict", "--json", "--deadline", "1"),
}


@pytest.mark.parametrize("code", RESTORES)
def test_restore_exits_with_the_code_of_what_went_wrong(tmp_path: Path, demo: Published, code: int) -> None:
    with silent_store() as (_, variables):
        ran = run(tmp_path, RESTORES[code](tmp_path, demo), **variables)
    assert ran.returncode == code, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["exit_code"], told["outcome"]) == (code, "refused")
    assert told["reason"] and told["hint"]
    assert f'hint="{told["hint"].split()[0]}' in ran.stderr or "hint=" in ran.stderr


def test_restore_without_room_exits_20(tmp_path: Path, demo: Published) -> None:
    ran = run(tmp_path, strict(demo), before="ulimit -f 0", PYTHONDONTWRITEBYTECODE="1")
    assert ran.returncode == 20, ran.stderr


def test_a_bug_exits_1(tmp_path: Path, demo: Published) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/zstandard.py").write_text("raise ZeroDivisionError('planted')\n")
    path = f"{tmp_path}/broken:{environment(tmp_path)['PYTHONPATH']}"
    ran = run(tmp_path, strict(demo), PYTHONPATH=path)
    assert ran.returncode == 1
    assert "ZeroDivisionError: planted" in json.loads(ran.stdout)["reason"]


def test_restore_exits_0_and_the_services_code_is_its_own(tmp_path: Path, demo: Published) -> None:
    assert run(tmp_path, strict(demo)).returncode == 0
    for code in (0, 1, 12, 99):
        argv = [word for word in strict(demo, "--", "sh", "-c", f"exit {code}") if word != "--json"]
        assert run(tmp_path, argv).returncode == code


@pytest.mark.parametrize(("command", "code"), [("/no/such/command", 127), ("/etc/hostname", 126), ("/", 126)])
def test_a_command_that_cannot_run_exits_as_in_a_shell(
    tmp_path: Path, demo: Published, command: str, code: int
) -> None:
    ran = run(tmp_path, [word for word in strict(demo, "--", command) if word != "--json"])
    assert ran.returncode == code
    assert f"cannot run `{command}`" in ran.stderr


def test_a_service_dies_of_a_broken_pipe_as_anywhere_else(tmp_path: Path, demo: Published) -> None:
    argv = [word for word in strict(demo, "--", "sh", "-c", "yes; echo $? >&2") if word != "--json"]
    ran = run(tmp_path, ["bash", "-c", f"set -o pipefail; {shlex.join(argv)} | head -1"])
    assert "141" in ran.stderr.split()


# --- the other commands ----------------------------------------------------------------------------------------------------


def no_target(base: Path) -> list[str]:
    tree = {**small_manifest(), "targets": [{"device": "cuda", "gpu": "no such GPU"}]}
    return ["build", str(write_manifest(base, tree)), "--no-publish"]


COMMANDS: dict[str, tuple[int, Callable[[Path, Published], list[str]]]] = {
    "usage": (2, lambda base, demo: ["ls", "--wat"]),
    "manifest": (10, lambda base, demo: ["plan", str(write_manifest(base, "version: 1\nnam: x\n"))]),
    "build": (11, lambda base, demo: no_target(base)),
    "miss": (12, lambda base, demo: ["show", demo.store.url, "absent@stable"]),
    "integrity": (13, lambda base, demo: (cut_index(base, demo), ["show", demo.store.url, "demo@stable"])[1]),
    "trust": (14, lambda base, demo: ["show", demo.store.url, "demo@stable", "--trust", write_policy(base / "p.json")]),
    "store": (15, lambda base, demo: ["ls", "gopher://x"]),
    "path": (17, lambda base, demo: ["lock", demo.store.url, "--name", "demo", "--output", "/no/such/folder/x"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_exits_with_the_code_of_its_error_and_says_it_in_json(
    tmp_path: Path, demo: Published, name: str
) -> None:
    code, words = COMMANDS[name]
    ran = run(tmp_path, [*CLI, *words(tmp_path, demo), "--json"])
    assert ran.returncode == code, ran.stderr
    error: dict[str, Any] = json.loads(ran.stdout)["error"]
    assert error["exit_code"] == code
    assert error["hint"] in ran.stderr
    assert any(line.startswith("error: ") for line in ran.stderr.splitlines())


def test_a_publisher_that_never_wins_exits_16(tmp_path: Path, demo: Published) -> None:
    # a folder stands where the next version would: it is taken each time, and never ours
    Path(demo.store.root, index_key("demo", "canary", 1)).mkdir(parents=True)
    code = (
        "import sys, cachepipe.workflows.publish as publish\n"
        "publish.commit_index.__defaults__ = (0.3,)\n"
        "from cachepipe.entrypoint import main\nsys.exit(main(sys.argv[1:]))"
    )
    line = ["promote", demo.store.url, "--name", "demo", "--from", "stable", "--to", "canary", "--json"]
    ran = run(tmp_path, [sys.executable, "-c", code, *line])
    assert ran.returncode == 16, ran.stderr
    assert "other publishers won" in json.loads(ran.stdout)["error"]["message"]


def test_a_verdict_that_is_not_good_exits_18(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    ran = run(tmp_path, [*CLI, "doctor", f"file://{tmp_path}/store", "--name", "absent", "--json"])
    assert ran.returncode == 18, ran.stderr
    failed = [check for check in json.loads(ran.stdout)["checks"] if check["verdict"] == "fail"]
    assert failed and all(check["advice"] for check in failed)


ELSEWHERE = {
    141: ("tests/unit/cli/test_output.py", "test_an_answer_that_cannot_be_printed_is_one_error_and_never_a_success"),
    130: ("tests/e2e/test_restore_process.py", "test_a_signal_during_restore_ends_it_without_a_start"),
    143: ("tests/e2e/test_restore_process.py", "test_a_signal_during_restore_ends_it_without_a_start"),
}
HERE = {0, 1, 2, 16, 18, 20, 126, 127, *RESTORES, *(code for code, _ in COMMANDS.values())}


def test_every_code_of_the_tree_and_of_the_readme_is_exercised_by_a_command_line() -> None:
    def codes(kind: type[CachepipeError]) -> set[int]:
        return {kind.exit_code}.union(*(codes(below) for below in kind.__subclasses__()))

    readme = (REPOSITORY / "README.md").read_text()
    table = readme.partition("### Exit codes\n")[2].partition("\n\nA restore")[0]
    rows = re.findall(r"^\| ([0-9][0-9, ]*) \|", table, re.MULTILINE)
    promised = {int(number) for row in rows for number in row.split(",")}
    assert codes(CachepipeError) <= promised
    assert promised == HERE | set(ELSEWHERE)
    for path, name in ELSEWHERE.values():
        assert f"def {name}(" in (REPOSITORY / path).read_text()
    assert issubclass(Interrupted, CachepipeError)
