"""The module with native functions that a service calls (engine `aot`), and the choice between it and torch.compile alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from cachepipe.domain.engine import JIT, VARIABLE
from cachepipe.runtime.engine import Different, Engine, Listener


class EngineModule(nn.Module):
    """What `entry.compile` returns for an entry with the engine `aot`; to be used as torch.compile's `OptimizedModule`.

    Attributes are the wrapped module's, which is its child `_orig_mod`; torch.compile is imported with the first call
    that needs it.
    """

    _own = frozenset({"_orig_mod", "_engine", "_make_traced", "_traced", "_is_complete"})

    def __init__(self, module: nn.Module, engine: Engine, make_traced: Callable[[], Callable[..., Any]]) -> None:
        # before anything else: nn.Module's own constructor writes `training`, which is the wrapped module's
        object.__setattr__(self, "_is_complete", False)
        super().__init__()
        self._modules["_orig_mod"] = module
        self._engine, self._make_traced = engine, make_traced
        self._traced: Callable[..., Any] | None = None
        self._is_complete = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # somebody else's trace goes through the model itself
            return self._orig_mod(*args, **kwargs)
        try:
            function, weights, inputs = self._engine.find(args, kwargs)
        except Different as different:
            self._engine.say(str(different))
            return self._trace()(*args, **kwargs)
        try:
            found = function.run(weights, inputs)
        except RuntimeError as error:  # nothing was written: the trace gives its own answer, or its own error
            self._engine.say(f"the native function failed: {str(error)[:200]}", function.label)
            return self._trace()(*args, **kwargs)
        return function.unflatten(found)

    def _trace(self) -> Callable[..., Any]:
        if self._traced is None:
            object.__setattr__(self, "_traced", self._make_traced())  # nn.Module would make it a child
        return cast(Callable[..., Any], self._traced)

    @property
    def training(self) -> bool:
        return bool(self._modules["_orig_mod"].training) if self._is_complete else True  # type: ignore[union-attr]

    @training.setter
    def training(self, is_training: bool) -> None:
        if self._is_complete:
            self._orig_mod.training = is_training

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__["_modules"]["_orig_mod"]
        return wrapped if name == "_orig_mod" else getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._own or hasattr(type(self), name):
            super().__delattr__(name)
        else:
            delattr(self._orig_mod, name)

    def __len__(self) -> int:
        return len(self._orig_mod)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._orig_mod)})

    def __reduce__(self) -> Any:
        return torch.compile, (self._orig_mod,)


def engine_model(
    module: nn.Module,
    folder: Path,
    device: str,
    listener: Listener,
    make_traced: Callable[[], Callable[..., Any]],
    replays: bool = False,
) -> Callable[..., Any]:
    """Returns the module with its native functions, or what `make_traced` gives where they cannot be used.

    Args:
        module: prepared as the builder did.
        folder: with `engine.json`.
        device: of the entry.
        listener: hears why they cannot be used, and of every first call.
        make_traced: torch.compile of the module; called when it is needed.
        replays: the functions are replayed from CUDA graphs.
    """
    try:
        if os.environ.get(VARIABLE) == JIT:
            raise Different(f"{VARIABLE}={JIT}")
        return EngineModule(module, Engine(module, folder, device, listener, replays), make_traced)
    except Different as different:
        reason = str(different)
    except Exception as error:  # noqa: BLE001
        # the boundary to torch's private parts: whatever they do in a version to come, the service starts
        reason = f"{type(error).__name__}: {error}"
    listener.on_engine("-", False, reason)
    return make_traced()
