"""Notices changes of a module, of its classes and of torch's ambient state between two calls, almost for free.

torch's own guards do the work, without torch.compile: a version number that CPython or torch keeps for every dict, a
check of tensors against what they were, and a check of the global state. Nothing here imports torch._dynamo.

Source: torch/csrc/dynamo/guards.cpp (`dict_version`, `TensorGuards`, `GlobalStateGuard`), checked against torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards, dict_version

_forward = attrgetter("forward")
_values = methodcaller("values")


class Watch:
    """What is looked at: dicts by version, modules by class, classes by their members, lists and sets by their items."""

    def __init__(self) -> None:
        self._dicts: dict[int, dict[Any, Any]] = {}
        self._modules: list[Any] = []
        self._classes: dict[type, Any] = {}
        self._lists: dict[int, Any] = {}
        self._scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._versions: list[int] = []
        self._types: list[type] = []
        self._kinds: list[type] = []
        self._forwards: list[Any] = []
        self._members: list[tuple[Any, ...]] = []
        self._items: list[list[Any]] = []

    def add_dict(self, watched: dict[Any, Any]) -> None:
        self._dicts[id(watched)] = watched

    def add_scope(self, scope: dict[str, Any], names: Iterable[str]) -> None:
        """Watches some names of a module's globals; whatever else a service writes there is no change."""
        self._scopes.setdefault(id(scope), (scope, set()))[1].update(names)

    def add_module(self, module: torch.nn.Module) -> None:
        self._modules.append(module)

    def add_class(self, watched: type) -> None:
        self._classes[watched] = vars(watched)

    def add_list(self, watched: Any) -> None:
        """Watches a list or a set."""
        self._lists[id(watched)] = watched

    def pin(self) -> None:
        """Takes everything as it is now; ends the adding."""
        self._watched = list(self._dicts.values())
        self._versions = list(map(dict_version, self._watched))
        self._types = list(map(type, self._modules))
        self._kinds = list(dict.fromkeys(self._types))
        self._forwards = list(map(_forward, self._kinds))
        self._proxies = list(self._classes.values())
        # kept alive, so that no later object can have the address of an earlier one
        self._members = list(map(tuple, map(_values, self._proxies)))
        self._member_ids = [list(map(id, members)) for members in self._members]
        # what is watched by name alone is not watched whole
        self._scoped = [(scope, sorted(names)) for scope, names in self._scopes.values()]
        self._scope_versions = [dict_version(scope) for scope, _ in self._scoped]
        self._globals = [list(map(scope.get, names)) for scope, names in self._scoped]
        self._items = [list(items) for items in self._lists.values()]
        self._item_ids = [list(map(id, items)) for items in self._items]

    def is_same(self) -> bool:
        """Tells whether nothing has changed since `pin`; what is written again with an equal value counts as changed."""
        return (
            list(map(dict_version, self._watched)) == self._versions
            and self._is_scope_same()
            and list(map(type, self._modules)) == self._types
            and list(map(_forward, self._kinds)) == self._forwards
            and [list(map(id, members)) for members in map(_values, self._proxies)] == self._member_ids
            and [list(map(id, items)) for items in self._lists.values()] == self._item_ids
        )

    def _is_scope_same(self) -> bool:
        versions = [dict_version(scope) for scope, _ in self._scoped]
        if versions == self._scope_versions:
            return True
        found = [list(map(scope.get, names)) for scope, names in self._scoped]
        pairs = zip(found, self._globals, strict=True)
        if any(list(map(id, one)) != list(map(id, other)) for one, other in pairs):
            return False
        self._scope_versions = versions
        return True


class Ambient:
    """torch's state around a call and the form of a module's tensors, as they were when this was made.

    Inference mode or not is part of how torch sees a tensor: make one of these for each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._state = GlobalStateGuard()
        # without the two keywords, or with lists of None, the constructor crashes
        self._check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self._is_state = self._state.check

    def is_same(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Tells whether grad mode, autocast, precision, determinism, threads and default dtype are as they were, no mode
        that rewrites calls is on, and every tensor still has its dtype, shape, strides, device and requires_grad."""
        return self._is_state() and not has_modes() and self._check(*tensors)


def has_modes() -> bool:
    """Tells whether a torch-function or dispatch mode is on: a default device, a profiler of operators, a tracer."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


@functools.cache
def plain_keys(device: str) -> frozenset[int]:
    """Returns the dispatch keys of ordinary dense tensors on a device, born in inference mode or not.

    Conjugated, negated, batched, sparse, quantised and wrapped tensors have others.
    """
    found = []
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            found.append(keys_of(torch.empty(0, device=device)))
    return frozenset(found)


def keys_of(tensor: torch.Tensor) -> int:
    """Returns the dispatch keys of a tensor as one number."""
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return keys
