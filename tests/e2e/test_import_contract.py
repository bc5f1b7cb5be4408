"""The import contract refuses what it forbids: each violation is planted in a copy of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.release import REPOSITORY, clean_environment

RUN = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "cachepipe", tmp_path / "cachepipe", ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    env = clean_environment(PYTHONPATH=str(folder), COLUMNS="200")
    command = [sys.executable, "-c", RUN, "--no-cache"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_package_keeps_its_contract(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("domain/lock.py", "import click", "domain is pure"),
        ("domain/lock.py", "import subprocess", "domain is pure"),
        ("adapters/lease.py", "from cachepipe.workflows import restore", "layers"),
        ("workflows/plan.py", "from cachepipe.cli import main", "layers"),
        ("workflows/plan.py", "import torch._inductor", "torch: only"),
        ("workflows/build.py", "def f():\n    import boto3", "boto3: only"),
        ("adapters/cachetree.py", "import zstandard", "zstandard: only"),
        ("adapters/machine.py", "import pynvml", "pynvml: only"),
        ("domain/index.py", "import pydantic", "pydantic: only"),
        ("workflows/plan.py", "import rich.table", "click, rich: only"),
        ("adapters/lease.py", "import asyncio", "restore path"),
        ("domain/record.py", "from cachepipe.domain import manifest", "restore path"),
        ("runtime/attempts.py", "from cachepipe.adapters import lease", "runtime: domain"),
    ],
)
def test_a_forbidden_import_breaks_the_contract(copy: Path, module: str, line: str, contract: str) -> None:
    path = copy / "cachepipe" / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    done = lint(copy)
    assert done.returncode == 1, done.stdout
    broken = [line for line in done.stdout.splitlines() if "BROKEN" in line]
    assert any(text.startswith(contract) for text in broken), broken
