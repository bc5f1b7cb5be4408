"""The part of cachepipe that lives in the service's process: recorder on, attempt mark, one line when it is quiet.

Attached by the wheel's `.pth` file (`runtime/pth.py`) or by `cachepipe.attach()`. Until `ready()` everything torch
compiles is recorded; afterwards the recorder is out and only torch's own compile callback is left: a compile from
then on is *late* (`runtime/late.py`). What is told goes through `runtime/events.py`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cachepipe.adapters.torch_compiling import (  # hooks run in the middle of imports and make none
    watch_compiles,
    watch_limit,
)
from cachepipe.domain.evidence import Work
from cachepipe.errors import LateCompileError
from cachepipe.importing import when_imported
from cachepipe.runtime import attempts, backports, garbage
from cachepipe.runtime.details import expected_graphs, restored_device, tell_misses
from cachepipe.runtime.events import say
from cachepipe.runtime.late import LateCompile, LateWatch
from cachepipe.runtime.recorder import Recorder

if TYPE_CHECKING:
    from cachepipe.runtime.attempts import Attempt

_OF_WORKERS = ("new_files", "isa_probes", "compiler_queries", "compiler_runs", "ptxas_runs")
"""Counted by an audit hook, which no service gets."""

__all__ = ("Attached", "LateCompile", "attach", "finish", "say", "state", "summary")

QUIET_S = 60.0
"""Without a compile for so long a service that never says `ready()` is taken to be warm."""


@dataclass
class Attached:
    """The state of this process; one per process, made by `attach`."""

    recorder: Recorder
    began: float
    attempts: list[Attempt] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    """Ambient torch settings at the first compile."""
    changed: tuple[str, ...] = ()
    """As `LateCompile.settings`, of the compile in progress."""
    late_watch: LateWatch = field(init=False)
    is_restored: bool = field(default_factory=lambda: bool(os.environ.get("CACHEPIPE_ROOT")))
    holds_garbage: int = 0
    """Open compiles for which the collector is held back."""
    is_ready: bool = False
    is_tried: bool = False
    """The attempt marks were made."""
    last_compile: float = 0.0
    compiles_open: int = 0
    compiles_ended: int = 0
    ready_s: float = 0.0

    def __post_init__(self) -> None:
        self.late_watch = LateWatch(self.recorder)

    @property
    def late(self) -> list[LateCompile]:
        return self.late_watch.compiles


_state: Attached | None = None
_lock = threading.RLock()


def state() -> Attached | None:
    """Returns what is attached to this process, if anything."""
    return _state


def attach(*, strict: bool | None = None) -> Attached:
    """Attaches to this process, once; never raises because of the cache or torch's version.

    Args:
        strict: a compile after `ready()` raises `LateCompileError` instead of compiling; None: as `CACHEPIPE_STRICT=1` says.
    """
    global _state  # noqa: PLW0603
    with _lock:
        if strict is not None and _state is not None:
            _state.late_watch.is_strict = strict
        if _state is not None:
            return _state
        explains = os.environ.get("CACHEPIPE_EXPLAIN") == "1"
        _state = Attached(Recorder(explains), time.monotonic(), last_compile=time.monotonic())
        if strict is not None:
            _state.late_watch.is_strict = strict
    _state.recorder.start()
    backports.apply(os.environ.get("CACHEPIPE_ROOT", ""), _torch_version())
    when_imported("torch._dynamo.callback", _watch_compiles)
    when_imported("torch._dynamo.convert_frame", _watch_limit)
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_after_fork)
    _start_timer()
    return _state


def finish(how: str) -> None:
    """Ends the recording: marks the attempt as finished, takes the recorder out, prints the one line; once."""
    attached = _state
    if attached is None:
        return
    with _lock:
        if attached.is_ready:
            return
        attached.is_ready = True
        attached.ready_s = time.monotonic() - attached.began
    attached.recorder.stop()
    for attempt in attached.attempts:
        attempt.finish()
    try:
        say("ready", how=how, **summary(attached), expected_graphs=expected_graphs())
        tell_misses(attached)
    except Exception as error:  # noqa: BLE001 - a service that is ready must not go down for want of a line
        say("attach", problem=f"not told: {type(error).__name__}: {error}")


class EngineListener:
    """Hears of native functions: what they answer is recorded like a cache hit, why one is not used is said."""

    def __init__(self, entry: str) -> None:
        self._entry = entry

    def on_engine(self, label: str, is_hit: bool, reason: str) -> None:
        attached = _state
        if attached is not None:
            attached.recorder.on_engine(label, is_hit, reason)
            if is_hit:
                attached.last_compile = time.monotonic()
                attached.compiles_ended += 1
        if not is_hit:
            say("engine", entry=self._entry, outcome="traced", reason=reason)

    def on_capture(self, label: str, reason: str) -> None:
        if _state is not None:
            _state.recorder.on_capture(label, reason)
        if reason:
            say("engine", entry=self._entry, outcome="plain", shape_bucket=label, reason=reason)


def engine_listener(entry: str) -> EngineListener:
    """Returns what hears of an entry's native functions. They start without a compile, so recording and the attempt,
    which otherwise wait for one, begin here, before anything is loaded."""
    if os.environ.get("CACHEPIPE_ATTACH") == "1":
        _begin_attempts(attach())
    return EngineListener(entry)


def summary(attached: Attached) -> dict[str, Any]:
    """Returns the numbers of the ready line."""
    recorder, work = attached.recorder, attached.recorder.work()
    return {
        "start": os.environ.get("CACHEPIPE_START_ID", "-"),
        "digest": os.environ.get("CACHEPIPE_RESTORED", "-")[:12] or "-",
        "graphs": sum(len(log.graphs) for log in recorder.logs.values()),
        "hits": recorder.count("hit"),
        "misses": recorder.count("miss"),
        "bypasses": recorder.count("bypass"),
        "graph_breaks": sum(len(log.graph_breaks) for log in recorder.logs.values()),
        **{name: getattr(work, name) for name in Work.__dataclass_fields__ if name not in _OF_WORKERS},
        "late": attached.late_watch.count,
        "seconds": round(attached.ready_s, 2),
        **(
            {"uncounted": ",".join(dict.fromkeys(one.kind for one in recorder.uncounted))} if recorder.uncounted else {}
        ),
    }


def _begin_attempts(attached: Attached) -> None:
    """Marks each restored digest as under trial, once; a full or unwritable disk only costs the quarantine.

    When: the first compile begins. What dies earlier did not die of the cache, and a process that compiles nothing (a
    loader's worker, a script of the entrypoint) is no start.
    """
    with _lock:
        if attached.is_tried or attached.is_ready:
            return
        attached.is_tried = True
    folder, start = os.environ.get("CACHEPIPE_STATE_DIR"), os.environ.get("CACHEPIPE_START_ID")
    digests = [digest for digest in os.environ.get("CACHEPIPE_RESTORED", "").split(",") if digest]
    if not folder or not start:
        return
    for digest in digests:
        try:
            attached.attempts.append(attempts.begin(folder, digest, f"{start}.{os.getpid()}"))
        except OSError as error:
            say("attach", problem=f"no quarantine: {error}")


def _torch_version() -> str:
    return str(getattr(sys.modules.get("torch"), "__version__", ""))


def _watch_compiles(module: ModuleType) -> None:
    try:
        watch_compiles(module, _on_compile_start, _on_compile_end)
    except AttributeError:
        if _state is not None:
            _begin_attempts(_state)  # a torch that does not tell when a compile begins
        raise


def _watch_limit(module: ModuleType) -> None:
    watch_limit(module, _on_limit)


def _on_limit() -> None:
    attached = _state
    if attached is None:
        return
    try:
        _compare_settings(attached)
        attached.late_watch.limit(attached.changed, attached.is_ready)
    except LateCompileError:
        raise
    except Exception as error:  # noqa: BLE001 - the call is answered eager all the same
        say("attach", problem=f"recompile limit not told: {type(error).__name__}: {error}")


def _on_compile_start(args: Any) -> None:
    attached = _state
    if attached is None:
        return
    attached.last_compile = time.monotonic()
    attached.compiles_open += 1
    if attached.is_restored and not attached.is_ready:  # requests of other threads leave garbage too, of any size
        attached.holds_garbage += 1
        garbage.begin()
    _begin_attempts(attached)
    attached.recorder.hear()
    if attached.is_ready or not attached.settings:
        try:
            _compare_settings(attached)
        except Exception as error:  # noqa: BLE001 - it would end the call that is compiled for
            say("attach", problem=f"settings not read: {type(error).__name__}: {error}")
    if attached.is_ready:
        attached.late_watch.begin(args, attached.changed)


def _compare_settings(attached: Attached) -> None:
    from cachepipe.adapters.torch_settings import ambient_settings

    here = ambient_settings(restored_device() or "cpu")
    attached.settings = attached.settings or here
    first = attached.settings
    attached.changed = tuple(
        f"{name}: {first.get(name)} to {here[name]}" for name in here if first.get(name) != here[name]
    )


def _on_compile_end(args: Any) -> None:
    attached = _state
    if attached is None:
        return
    attached.last_compile = time.monotonic()
    attached.compiles_open -= 1
    if attached.holds_garbage:
        attached.holds_garbage -= 1
        garbage.end()
    attached.compiles_ended += 1
    if attached.is_ready:
        try:
            attached.late_watch.end()
        except Exception as error:  # noqa: BLE001 - it would end the call that was compiled for
            say("attach", problem=f"late compile not told: {type(error).__name__}: {error}")


def _after_fork() -> None:
    attached = _state
    if attached is not None:
        attached.recorder.after_fork()
    _start_timer()


def _start_timer() -> None:
    threading.Thread(target=_wait_until_quiet, name="cachepipe-quiet", daemon=True).start()


def _wait_until_quiet() -> None:
    while (attached := _state) is not None and not attached.is_ready:
        left = attached.last_compile + QUIET_S - time.monotonic()
        if left <= 0 and attached.compiles_open <= 0 and attached.compiles_ended:
            finish("quiet")
            return
        time.sleep(max(1.0, left))


def _at_exit() -> None:
    """An orderly exit ends the trial, unless the process failed before one compiled graph was through."""
    attached = _state
    if attached is None or attached.is_ready:
        return
    has_failed = getattr(sys, "last_type", None) is not None
    if has_failed or not attached.compiles_ended:
        attached.recorder.stop()
        say("exit", **summary(attached))
        return
    finish("exit")
