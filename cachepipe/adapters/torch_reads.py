"""Tells which attributes of a module, and of the objects in it, a call reads.

An attribute is watched by a property of its name in the class of its owner: Python asks a class for those before it looks into the
object, so `self.x`, `getattr` of a name that is put together, and `operator.attrgetter` are all seen; `vars(self)["x"]` is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from cachepipe.domain.engine import in_words
from cachepipe.errors import UsageError

_NONE = object()


class Reads:
    """Watches attributes while this is entered, once or more often. An object may be copied before it is read, so a read of any
    of its class counts."""

    def __init__(self, module: nn.Module, places: Iterable[str]) -> None:
        self._places = tuple(places)
        self._read_ones: set[str] = set()
        self._untold: set[str] = set()
        """Places that cannot be watched: items of lists and dicts, and what a class answers itself."""
        self._watched: dict[tuple[type, str], list[str]] = {}
        self._undo = ExitStack()
        for place in self._places:
            owner, name = _owner(module, place)
            if owner is None or _is_answered(type(owner), name):
                self._untold.add(place)
            else:
                self._watched.setdefault((type(owner), name), []).append(place)

    def __enter__(self) -> Reads:
        # found before the first is set, which a subclass would inherit
        defaults = {key: inspect.getattr_static(*key, _NONE) for key in self._watched}
        for (cls, name), default in defaults.items():
            own = vars(cls).get(name, _NONE)
            try:
                setattr(cls, name, self._property((cls, name), default))
            except (AttributeError, TypeError):  # a class of C, or one that guards its members
                self._untold.update(self._watched[cls, name])
                continue
            self._undo.callback(*((delattr, cls, name) if own is _NONE else (setattr, cls, name, own)))
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def unread(self) -> tuple[str, ...]:
        """Returns the places of which it is certain that nothing has read them.

        Raises:
            UsageError: some were read. One proof cannot tell what another value would have done, such as a branch that it takes.
        """
        if self._read_ones:
            names = in_words(tuple(sorted(self._read_ones)))
            raise UsageError(f"`engine: aot`: a call reads what every process has anew: {names}")
        return tuple(place for place in self._places if place not in self._untold)

    def _property(self, key: tuple[type, str], default: Any) -> property:
        return property(partial(self._read, key, default), partial(_write, key[1]), partial(_delete, key[1]))

    def _read(self, key: tuple[type, str], default: Any, owner: Any) -> Any:
        self._read_ones.update(self._watched[key])
        found = vars(owner).get(key[1], default)
        if found is _NONE:
            raise AttributeError(f"'{type(owner).__name__}' object has no attribute '{key[1]}'")
        return found


def _write(name: str, owner: Any, value: Any) -> None:
    vars(owner)[name] = value


def _delete(name: str, owner: Any) -> None:
    if vars(owner).pop(name, _NONE) is _NONE:
        raise AttributeError(name)


def _owner(module: nn.Module, place: str) -> tuple[Any, str]:
    """Returns the object that holds what is described at `self.a.b.name`, and the name; None: no plain path leads there."""
    owner: Any = module
    *path, name = place.split(".")[1:]
    for part in path:
        held = getattr(owner, "__dict__", {})
        owner = {**held, **(owner._modules if isinstance(owner, nn.Module) else {})}.get(part)
    return (owner, name) if name in getattr(owner, "__dict__", {}) else (None, name)


def _is_answered(cls: type, name: str) -> bool:
    """Tells whether a class has a property or the like of this name, which is read in place of what the object holds."""
    return hasattr(type(inspect.getattr_static(cls, name, None)), "__get__")
