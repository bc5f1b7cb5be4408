"""`ci/torch-names`: private names are looked up without importing, and the one table holds every name that we use."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from cachepipe.adapters.torch_names import FIRST, LAST, TABLE, names_of
from cachepipe.runtime.backports import TABLE as BACKPORTS
from tests.support.release import REPOSITORY, clean_environment

SCRIPT = REPOSITORY / "ci" / "torch-names"
USERS = [
    *(REPOSITORY / "cachepipe" / "adapters").glob("torch_*.py"),
    *(REPOSITORY / "cachepipe" / "runtime").glob("*.py"),
    REPOSITORY / "cachepipe" / "adapters" / "worker.py",
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("cachepipe_torch_names", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, check=False, text=True, env=clean_environment())


def installed() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


def test_the_installed_torch_has_every_name_and_a_folder_of_another_version_too() -> None:
    done = run(str(installed()))
    assert done.returncode == 0, done.stdout
    assert " 0 missing" in done.stdout
    other = os.environ.get("TORCH_NAMES_OF", "")  # e.g. `--version 2.11 /path/of/unpacked/wheels`
    if other:
        done = run(*other.split())
        assert done.returncode == 0, done.stdout


def test_a_name_that_went_away_is_told_by_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "torch.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/version.py", "__version__ = '2.13.1+cpu'\n")
        archive.writestr(
            "torch/_functorch/config.py",
            "enable_autograd_cache = True\nautograd_cache_allow_custom_autograd_functions = False\n",
        )
    done = run(str(wheel))
    assert done.returncode == 1
    assert "missing in torch 2.13: torch._functorch.config.error_on_custom_op_aliasing" in done.stdout
    assert "2 names found, 1 missing" in done.stdout


def test_names_are_found_wherever_python_binds_them(script: ModuleType) -> None:
    text = """
import os.path, json as data
from place import thing as other
if os.name:
    here: int = 1
else:
    there, (deep, *rest) = 1, (2, 3)
try:
    def tried(): inner = 1
except ImportError:
    caught = None
class Outer:
    field: int = 0
    def method(self): ...
    class Nested:
        def below(self): ...
"""
    body = ast.parse(text).body
    for name in ("os", "data", "other", "here", "there", "deep", "rest", "tried", "caught", "Outer", "Outer.field"):
        assert script.has_name(body, name.split(".")), name
    for name in ("Outer.method", "Outer.Nested.below"):
        assert script.has_name(body, name.split(".")), name
    for name in ("json", "path", "inner", "field", "Outer.below", "tried.inner", "thing"):
        assert not script.has_name(body, name.split(".")), name


def test_a_place_without_version_asks_for_it(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.returncode == 1 and "--version" in done.stderr


def test_every_private_module_that_is_used_is_in_the_table() -> None:
    known = {name.module for name in TABLE}
    for path in USERS:
        text = path.read_text()
        tree = ast.parse(text)
        used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        used |= {f"{node.module}.{alias.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                 for alias in node.names if node.module in ("torch._dynamo", "torch._inductor", "torch._functorch")}  # fmt: skip
        used |= set(re.findall(r'when_imported\("([^"]+)"', text))
        private = {module for module in used if re.match(r"torch\._|triton", module)}
        missing = {
            module
            for module in private
            if module not in known and not any(f"{name.module}.{name.path}" == module for name in TABLE)
        }
        # a package from which a module of the table is imported
        missing = {module for module in missing if not any(name.startswith(f"{module}.") for name in known)}
        missing -= {f"torch.{package}.config" for package in ("_dynamo", "_inductor", "_functorch")}
        assert not missing, f"{path.name}: {missing}"


@pytest.mark.parametrize("backport", BACKPORTS, ids=lambda row: row.name)
def test_every_patched_module_is_in_the_table_for_its_versions(backport: object) -> None:
    for version in ((2, minor) for minor in range(backport.first[1], backport.last[1] + 1)):  # type: ignore[attr-defined]
        assert backport.module in {name.module for name in names_of(version)}  # type: ignore[attr-defined]


def test_back_ports_stay_within_the_versions_that_were_read() -> None:
    assert all(FIRST <= row.first <= row.last <= LAST for row in BACKPORTS)
