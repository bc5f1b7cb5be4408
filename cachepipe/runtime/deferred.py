"""A template that is compiled when it is first asked for anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Deferred:
    """Stands for a Jinja template until it is rendered, from then on for its `render`."""

    def __init__(self, compiled: Callable[[str], Any], source: str) -> None:
        self._compiled, self._source = compiled, source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of ours, before they are there, or of Python's own
            raise AttributeError(name)
        made = self._compiled(self._source)
        self.__dict__.update(render=made.render)
        return getattr(made, name)
