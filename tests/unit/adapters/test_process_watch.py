"""The processes that a worker starts, counted by kind: '0 ptxas, 0 host compilers' is proved by these counts.

An audit hook cannot be removed, so all commands run in one child process.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NAMES = ("ptxas", "ptxas-blackwell", "gcc", "cc", "c++", "g++", "clang", "clang++", "nvcc", "ld")
TOOLS = "{tools}"
COMMANDS: dict[str, tuple[list[str], dict[str, int]]] = {
    "ptxas of torch by its path": ([f"{TOOLS}/ptxas", "-lineinfo", "a.ptx", "-o", "a.o"], {"ptxas_runs": 1}),
    "ptxas by its name": (["ptxas", "a.ptx"], {"ptxas_runs": 1}),
    "ptxas of the GPUs after Hopper": ([f"{TOOLS}/ptxas-blackwell", "a.ptx"], {"ptxas_runs": 1}),
    "version of ptxas": ([f"{TOOLS}/ptxas", "--version"], {"compiler_queries": 1}),
    "version of the later ptxas": ([f"{TOOLS}/ptxas-blackwell", "--version"], {"compiler_queries": 1}),
    "launcher stub": (["gcc", "main.c", "-O3", "-shared", "-o", "a.so"], {"compiler_runs": 1}),
    "native object": (["g++", "-c", "a.cpp"], {"compiler_runs": 1}),
    **{f"build by {name}": ([f"{TOOLS}/{name}", "a"], {"compiler_runs": 1}) for name in NAMES[2:-1]},
    "a shell's command": (["sh", "-c", "gcc"], {}),
    "verbose build": (["gcc", "-v", "a.c"], {"compiler_runs": 1}),
    **{f"query {word}": (["g++", word], {"compiler_queries": 1}) for word in ("--version", "-v", "-dumpmachine")},
    "version in two words": (["g++", "-dumpfullversion", "-dumpversion"], {"compiler_queries": 1}),
    "preprocessor run": (["g++", "-E", "a.cpp"], {}),
    "probe of the vector ISA": ([sys.executable, "-S", "-c", "import os #LoadLibrary('a.so')"], {"isa_probes": 1}),
    "another tool": (["ld", "ptxas", "gcc"], {}),
    "a file that is named like one": (["ld", f"{TOOLS}/ptxas"], {}),
}
CHILD = """
import json, subprocess, sys
sys.path[:0] = {path!r}
from cachepipe.adapters.worker import Session
from cachepipe.domain.job import Job
from tests.support.artifacts import entry_spec
job = Job("prove", entry_spec(), (), 1, (), "/nonexistent/result", "/nonexistent/root", False, False)
session = Session(job)
found, known = {{}}, session.evidence().work
for label, command in json.load(sys.stdin):
    for closes in (True, False):  # Triton leaves descriptors open: Python may start it by posix_spawn
        subprocess.run(command, check=True, close_fds=closes)
        work = session.evidence().work
        rows = {{name: getattr(work, name) - getattr(known, name) for name in work.__dataclass_fields__}}
        found.setdefault(label, []).append({{name: count for name, count in rows.items() if count}})
        known = work
assert "torch" not in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    """Label → what the evidence of a worker counted when it started that command."""
    tools = tmp_path_factory.mktemp("tools")
    for name in NAMES:
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o700)
    rows = [(label, [word.replace(TOOLS, str(tools)) for word in words]) for label, (words, _) in COMMANDS.items()]
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(path=sys.path)],
        input=json.dumps(rows),
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, int]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("label", COMMANDS)
def test_a_process_is_counted_once_by_what_it_does(counted: dict[str, list[dict[str, int]]], label: str) -> None:
    assert counted[label] == [COMMANDS[label][1]] * 2
