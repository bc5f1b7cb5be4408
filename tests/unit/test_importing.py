"""Hooks after imports never change or break an import."""

from __future__ import annotations

import builtins
import sys
from functools import partial
from pathlib import Path

import pytest

from cachepipe import importing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_hook_runs_once_after_the_module_is_complete(folder: Path) -> None:
    (folder / "late_one.py").write_text("value = 1\nvalue = 2\n")
    seen: list[int] = []
    importing.when_imported("late_one", lambda module: seen.append(module.value))
    import late_one  # type: ignore[import-not-found]

    assert seen == [2]
    assert late_one.__spec__.loader.__class__.__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(late_one.__spec__.loader)
    assert importing._finder not in sys.meta_path


def test_a_module_that_is_there_is_hooked_at_once() -> None:
    seen: list[str] = []
    importing.when_imported("json", lambda module: seen.append(module.__name__))
    assert seen == ["json"]


def test_a_hook_for_a_module_in_the_middle_of_its_import_runs_at_the_next_import_once(folder: Path) -> None:
    (folder / "half_way.py").write_text("import half_way_inner\nvalue = 2\n")
    (folder / "half_way_inner.py").write_text("import ask_for_a_hook\n")
    (folder / "ask_for_a_hook.py").write_text("ask()\n")
    (folder / "anything_else.py").write_text("")
    seen: list[int] = []
    ask = partial(importing.when_imported, "half_way", lambda module: seen.append(module.value))
    asks = importing.when_imported("half_way_inner", lambda module: None)
    vars(builtins)["ask"] = ask
    try:
        import half_way  # type: ignore[import-not-found]
    finally:
        del vars(builtins)["ask"]
    asks()
    assert half_way.value == 2
    import anything_else  # type: ignore[import-not-found]  # noqa: F401

    assert seen == [2]
    assert not importing._hooks


def test_the_import_that_runs_the_last_overdue_hook_finds_built_in_modules_too(folder: Path) -> None:
    (folder / "now_loading.py").write_text("import ask_again\n")
    (folder / "ask_again.py").write_text("ask()\n")
    seen: list[str] = []
    vars(builtins)["ask"] = partial(importing.when_imported, "now_loading", lambda module: seen.append(module.__name__))
    try:
        import now_loading  # type: ignore[import-not-found]  # noqa: F401
    finally:
        del vars(builtins)["ask"]
    found = sys.modules.pop("_ast")
    try:
        import _ast
    finally:
        sys.modules["_ast"] = found
    assert seen == ["now_loading"] and _ast.AST
    assert not importing._hooks


def test_an_error_in_a_hook_does_not_reach_the_importer(folder: Path) -> None:
    (folder / "late_two.py").write_text("value = 1\n")

    def hook(module: object) -> None:
        raise RuntimeError("ours")

    importing.when_imported("late_two", hook)
    import late_two  # type: ignore[import-not-found]

    assert late_two.value == 1
    assert importing.swallowed[-1] == "late_two: RuntimeError: ours"


def test_an_error_of_the_module_is_its_own(folder: Path) -> None:
    (folder / "late_three.py").write_text("raise ValueError('theirs')\n")
    cancel = importing.when_imported("late_three", lambda module: None)
    with pytest.raises(ValueError, match="theirs"):
        import late_three  # type: ignore[import-not-found]  # noqa: F401
    cancel()


def test_a_module_that_does_not_exist_stays_missing() -> None:
    cancel = importing.when_imported("no_such_module_here", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        import no_such_module_here  # type: ignore[import-not-found]  # noqa: F401
    cancel()
    assert importing._finder not in sys.meta_path
