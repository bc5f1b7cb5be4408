"""The test programme of trust: each suite by its id, in the files whose docstrings name it, with no fewer tests than promised."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FEWEST = {
    "T-CONTRACT": 15, "T-HOST": 2, "T-FLIP": 6, "T-PROP": 12, "T-TUF": 57, "T-KEY": 57, "T-BOMB": 12, "T-DIR": 24,
    "T-FAULT": 3, "T-EXEC": 5, "T-EXIT": 2, "T-IAM": 10, "T-COMPAT": 4, "T-DAMAGE": 2, "T-SOAK": 1,
}  # fmt: skip
"""Suite → test functions; most have parameters, T-HOST generates its thousand cases. T-TUF and T-KEY share a file: 45 and 12."""


@pytest.fixture(scope="module")
def suites() -> dict[str, list[str]]:
    """Returns suite → names of its test functions."""
    found: dict[str, list[str]] = {suite: [] for suite in FEWEST}
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        named = [suite for suite in FEWEST if suite in (ast.get_docstring(tree) or "")]
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        for suite in named if path != Path(__file__) else ():
            found[suite] += names
    return found


@pytest.mark.parametrize("suite", FEWEST)
def test_a_suite_is_there_and_whole(suites: dict[str, list[str]], suite: str) -> None:
    assert len(suites[suite]) >= FEWEST[suite]


@pytest.mark.parametrize("case", ["j1", "j2", "j3"])
def test_a_field_case_of_trust_has_a_test_by_its_id(case: str) -> None:
    assert any(f"case_{case}_" in path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__))
