"""A compile that begins in this thread, seen from torch's compile callback: what is compiled, why, called from where.

Everything is read from the Python frames below the callback, so that nothing has to be installed before.

Source: torch/_dynamo/convert_frame.py (`_compile`: its locals `frame`, `code`, `recompile_reason`; `exceeds_recompile_limit`), _dynamo/callback.py
(`CompilationCallbackHandler`: `start_callbacks`, `end_callbacks`, `clear`), _dynamo/exc.py (`UncapturedHigherOrderOpError`,
which `ConvertFrame` never suppresses); checked against torch 2.13.0.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from cachepipe.errors import LateCompileError

CAPTURES = ("CUDAGRAPH_RECORDING",)
"""Triggers of the callback that compile nothing."""
_MAX_INPUTS = 32
_TEXT_CHARS = 500


@dataclass(frozen=True)
class Compiling:
    """What is known when a compile begins."""

    place: str = ""
    """Function, file and line of what is compiled; empty for a backward graph."""
    call_site: str = ""
    """File, line and function of the call, outside of torch."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Tensor argument → its sizes."""
    reason: str = ""
    """The guard that failed, in torch's words; empty for the first compile of a function."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {'×'.join(map(str, size)) or 'scalar'}" for name, size in self.sizes.items())
        words = (
            self.place or "a backward graph",
            f"with {sizes}" if sizes else "",
            f"called at {self.call_site}" if self.call_site else "",
            f"because {self.reason}" if self.reason else "",
        )
        return " ".join(word for word in words if word)


class _Kept(list[Any]):
    """Callbacks that torch empties in `torch.compiler.reset()`, of which ours stays: the compiles behind it are those to tell."""

    def __init__(self, callbacks: Iterable[Any], ours: Any) -> None:
        super().__init__([*callbacks, ours])
        self._ours = ours

    def clear(self) -> None:
        self[:] = [self._ours]


def watch_compiles(callback: Any, on_start: Callable[[Any], None], on_end: Callable[[Any], None]) -> None:
    """Has both called around every compile from now on, also behind `torch.compiler.reset()`.

    Args:
        callback: the module torch._dynamo.callback.

    Raises:
        AttributeError: this torch has no such callbacks.
    """
    handler = callback.callback_handler
    handler.start_callbacks = _Kept(handler.start_callbacks, on_start)
    handler.end_callbacks = _Kept(handler.end_callbacks, on_end)


def watch_limit(convert_frame: Any, on_limit: Callable[[], None]) -> None:
    """Has `on_limit` called whenever torch gives up compiling a function again and answers eager, where `compiling` can tell of it.

    Args:
        convert_frame: the module torch._dynamo.convert_frame.

    Raises:
        AttributeError: this torch has no such function.
    """
    original: Callable[..., tuple[bool, str]] = convert_frame.exceeds_recompile_limit

    @functools.wraps(original)
    def exceeds_recompile_limit(*args: Any, **kwargs: Any) -> tuple[bool, str]:
        found = original(*args, **kwargs)
        if found[0]:
            on_limit()
        return found

    convert_frame.exceeds_recompile_limit = exceeds_recompile_limit


def runs_eager(error: BaseException) -> bool:
    """Tells whether torch answers the call eager whose compile ends in an error right now, in this thread."""
    from torch._dynamo.exc import Unsupported, UserError

    places = [frame.f_locals.get("one_graph") for frame in _frames() if _is_compile(frame)]
    return isinstance(error, (Unsupported, UserError)) and places[:1] == [False]


def _is_compile(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return frame.f_code.co_name == "_compile" and file.endswith(os.path.join("_dynamo", "convert_frame.py"))


def compiling() -> Compiling:
    """Returns the facts of the compile whose callback runs in this thread; never raises."""
    try:
        return _compiling()
    except Exception:  # noqa: BLE001 - arguments are the user's objects, and a late compile must not fail because of us
        return Compiling()


def _compiling() -> Compiling:
    inner, call_site = None, ""
    for frame in _frames():
        file = frame.f_code.co_filename
        if _is_compile(frame):
            inner = inner or frame
        if not call_site and not _is_plumbing(file):
            call_site = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
    if inner is None:
        return Compiling(call_site=call_site)
    found = inner.f_locals
    code, traced = found.get("code"), found.get("frame")
    return Compiling(
        place=f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else "",
        call_site=call_site,
        sizes=_sizes(getattr(traced, "f_locals", None)),
        reason=" ".join(str(found.get("recompile_reason") or "").split())[:_TEXT_CHARS],
    )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_plumbing(file: str) -> bool:
    folders = (
        f"{os.sep}torch{os.sep}",
        f"{os.sep}cachepipe{os.sep}runtime{os.sep}",
        f"{os.sep}cachepipe{os.sep}adapters{os.sep}",
    )
    return file.startswith("<") or file.endswith("contextlib.py") or any(folder in file for folder in folders)


def _sizes(arguments: Any) -> dict[str, list[int]]:
    """Returns tensor argument → sizes, those in lists, tuples and dicts one level deep by `name.key`."""
    rows: dict[str, list[int]] = {}
    if not isinstance(arguments, Mapping):
        return rows
    for name, value in list(arguments.items()):
        children: list[tuple[str, Any]] = [(str(name), value)]
        if isinstance(value, (list, tuple)):
            children = [(f"{name}.{number}", item) for number, item in enumerate(value[:_MAX_INPUTS])]
        elif isinstance(value, dict):
            children = [(f"{name}.{key}", item) for key, item in list(value.items())[:_MAX_INPUTS]]
        for label, item in children:
            shape = getattr(item, "shape", None)
            if type(item).__module__.startswith("torch") and isinstance(shape, tuple) and len(rows) < _MAX_INPUTS:
                rows[label] = [int(size) for size in shape]
    return rows


def late_compile_error(what: Compiling, hint: str) -> LateCompileError:
    """Returns the error to raise from a compile callback: ours, and of a class of torch's that it always passes on."""
    from torch._dynamo.exc import UncapturedHigherOrderOpError

    class LateCompile(LateCompileError, UncapturedHigherOrderOpError):
        def __init__(self, compiling: Compiling) -> None:
            LateCompileError.__init__(self, str(compiling), hint=hint)
            # what torch's own constructors set, which take other arguments than ours
            self.frame_exec_strategy = None
            self._torch_dynamo_tracer_output = None

        def __str__(self) -> str:
            return f"compile after `ready()`: {self.what}; {self.hint}"  # torch adds advice of its own to `args`

    LateCompile.__name__ = LateCompile.__qualname__ = LateCompileError.__name__
    LateCompile.__module__ = LateCompileError.__module__
    return LateCompile(what)
