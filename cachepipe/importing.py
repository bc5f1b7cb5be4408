"""Runs a function right after a module was imported, now or later, without importing it.

The import itself is never changed: an error in a hook is swallowed, the module's own loader does the work.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]

_lock = threading.RLock()
_hooks: dict[str, list[Hook]] = {}


class _Finder:
    """First on sys.meta_path while hooks wait; finds nothing itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        _call_overdue()
        if name not in _hooks:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if finder is not self and find else None
            if spec is not None:
                _wrap(spec, name)
                return spec
        return None


_finder = _Finder()


def when_imported(name: str, hook: Hook) -> Callable[[], None]:
    """Calls `hook(module)` once: at once if the module is there and ready, else right after its import; one that is being imported
    right now is past our finder, so its hook waits for the next import of anything.

    Returns:
        A function that stops waiting.
    """
    module = _imported(name)
    if module is not None:
        _call(hook, module)
        return lambda: None
    with _lock:
        _hooks.setdefault(name, []).append(hook)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)

    def cancel() -> None:
        _take(name, hook)

    return cancel


def _imported(name: str) -> ModuleType | None:
    """Returns a module that is there and whose import has ended."""
    module = sys.modules.get(name)
    is_loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if is_loading else module


def _call_overdue() -> None:
    for name in list(_hooks):
        module = _imported(name)
        if module is not None:
            for hook in _take(name, removes=False):  # an import is walking over the finders
                _call(hook, module)


def _take(name: str, hook: Hook | None = None, *, removes: bool = True) -> list[Hook]:
    """Returns and drops one hook of a module, or all; without any hook left our finder is gone too, or idle."""
    with _lock:
        waiting = _hooks.get(name, [])
        taken = [one for one in waiting if hook is None or one is hook]
        left = [one for one in waiting if one not in taken]
        if left:
            _hooks[name] = left
        else:
            _hooks.pop(name, None)
        if not _hooks and removes and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        return taken


def _wrap(spec: ModuleSpec, name: str) -> None:
    loader: Any = spec.loader
    original = getattr(loader, "exec_module", None)
    if original is None:
        return

    def exec_module(module: ModuleType) -> None:
        # the loader belongs to this spec alone: taken back before the module runs, so that reloads are untouched
        vars(loader).pop("exec_module", None)
        original(module)
        for hook in _take(name):
            _call(hook, module)

    try:
        loader.exec_module = exec_module
    except AttributeError:
        return


def _call(hook: Hook, module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:  # noqa: BLE001
        # a service's import must never fail because of us; doctor and CACHEPIPE_DEBUG show what was swallowed
        swallowed.append(f"{module.__name__}: {type(error).__name__}: {error}")


swallowed: list[str] = []
"""Errors of hooks, newest last."""
