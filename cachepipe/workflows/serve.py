"""The service side of restore: whatever happens, the service starts.

All work runs in a daemon thread. The main thread waits for its result or for the deadline, says in one line what came of
it, and becomes the command: with the restored folder, or with an empty private one. A name server, a driver or a mount that
hangs cannot hold it.

    cachepipe restore outcome=restored name=text-encoder digest=9f… bytes=660000 seconds=0.31 trust=unsigned folder=/…
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from cachepipe import streams
from cachepipe.adapters import cachedir
from cachepipe.adapters.execute import become, folder_variables, write_env_file
from cachepipe.adapters.lease import Lease
from cachepipe.errors import CachepipeError, DeadlineError, NoRoomError, UsageError
from cachepipe.failpoints import reached
from cachepipe.workflows.outcome import RestoreOutcome, RestoreRequest
from cachepipe.workflows.present import find, is_in_scratch
from cachepipe.workflows.restore_options import Options, flags_alone, parse

T = TypeVar("T")

INSECURE = "cachepipe: warning: --insecure-unsigned: whoever can write the store decides what runs here"

_BEYOND_S = 1.8
"""Beyond the deadline for all that a cold start still needs: its folder and the file of the variables, each of which may lie
on a mount that hangs; below the 2 s that a start may take."""

_COLD_S, _LAST_S = 0.7, 0.3
"""For each of two tries to make an empty folder, and the last."""

_ENV_FILE_S, _ENV_FILE_LEAST_S = 1.0, 0.2
"""To write the variables when the deadline is over or near, and what the folder leaves of it in any case."""

_ACCESS_S = 0.1
"""To ask which folders can be written, when no empty one could be made; and the least for anything."""

_LOOK_S = 0.1
"""A signal that another thread takes, or that comes just before a wait begins, does not end the wait: its handler runs after it."""


@dataclass(frozen=True)
class Start:
    """What a start has become; the one line is made of it."""

    outcome: str
    """`restored`, `present`, `cold`, or `refused` (nothing is started)."""
    exit_code: int
    reason: str
    hint: str
    names: tuple[str, ...]
    statements: tuple[str, ...]
    bytes: int
    trust: str
    folder: str
    variables: Mapping[str, str]
    lease: Lease | None


def run(argv: Sequence[str]) -> int:
    """Carries out `cachepipe restore …`: becomes the command after `--`, or returns the exit code if there is none.

    Args:
        argv: the words after `restore`.
    """
    began = time.monotonic()
    try:
        options = parse(argv, os.environ)
    except UsageError as error:
        return _start(flags_alone(argv, os.environ), os.urandom(16).hex(), began, error)
    return run_options(options, began)


def run_options(options: Options, began: float | None = None) -> int:
    """As `run`, with parsed options.

    Args:
        options: of this command line.
        began: `time.monotonic` when the process began; the deadline counts from it.
    """
    began = time.monotonic() if began is None else began
    _catch_signals()
    start_id = os.urandom(16).hex()
    deadline = began + options.deadline_s
    request = RestoreRequest(options, dict(os.environ), datetime.now(timezone.utc), deadline, start_id)
    umask = os.umask(0o077)  # what is written must be ours to read again, and nobody else's
    result = _bounded(lambda: _restore(request), deadline)
    os.umask(umask)
    if result is None:
        result = DeadlineError(f"not restored within {options.deadline_s:g} seconds")
    return _start(options, start_id, began, result)


def _restore(request: RestoreRequest) -> RestoreOutcome:
    found = find(request)
    if found is not None and not is_in_scratch(request, found.folder):
        return found
    from cachepipe.workflows.restore import restore_absent  # zstd and all else that a present folder does not need

    if found is not None:
        from cachepipe.workflows.homecoming import come_home

        return come_home(request, found, restore_absent, _bounded)
    try:
        return restore_absent(request)
    except CachepipeError as error:
        if request.refused:  # what lies there may be all that was to be used: a baked image without a network
            error.args = (f"{error}; {'; '.join(dict.fromkeys(request.refused))}",)
        raise


def _bounded(work: Callable[[], T], deadline: float) -> T | CachepipeError | None:
    """Returns the work's result or its error; None when it is not done by the deadline. Its thread is never joined."""
    box: list[T | CachepipeError] = []
    done = threading.Event()

    def guarded() -> None:
        try:
            box.append(work())
        except CachepipeError as error:
            box.append(error)
        except MemoryError:
            box.append(NoRoomError("out of memory", hint="raise the memory limit of the service"))
        except ImportError as error:
            hint = "install cachepipe with all it needs; if that is done, raise the memory limit of the service"
            box.append(CachepipeError(f"a library cannot be loaded: {error}", hint=hint))
        except Exception as error:  # noqa: BLE001 - the boundary: a bug of ours costs the warm start, not the service
            box.append(CachepipeError(f"{type(error).__name__}: {error}"))
        finally:
            done.set()

    try:
        threading.Thread(target=guarded, name="restore", daemon=True).start()
    except RuntimeError:
        return NoRoomError("no thread can be started", hint="raise the service's limit of memory or of processes")
    while not done.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))) and time.monotonic() < deadline:
        pass
    return box[0] if box else None


def _start(options: Options, start_id: str, began: float, result: RestoreOutcome | CachepipeError) -> int:  # noqa: RET503
    """Says what happened, then becomes the command or returns the exit code."""
    common = {"CACHEPIPE_START_ID": start_id}
    if not options.no_attach:
        common["CACHEPIPE_ATTACH"] = "1"
    deadline = began + options.deadline_s
    end = deadline + _BEYOND_S
    folder_end = end - (_ENV_FILE_LEAST_S if options.env_file else 0.0)
    start = _warm(result, common) if isinstance(result, RestoreOutcome) else _cold(result, options, common, folder_end)
    if options.env_file and start.outcome != "refused":
        limit_s = max(_ENV_FILE_S, deadline - time.monotonic())
        written = _bounded(lambda: write_env_file(options.env_file, start.variables), _until(limit_s, end))
        if written is None:
            written = UsageError(f"`--env-file {options.env_file}` cannot be written (its file system does not answer)")
        if isinstance(written, CachepipeError):
            _say(f"cachepipe: {written}")
            start = start if options.command else _cold(written, options, common, end)
    if options.accepts_unsigned:
        _say(INSECURE)
    _say(_line(start, start_id, time.monotonic() - began))
    if options.is_json:
        _print_json(start, start_id, time.monotonic() - began)
    if not options.command or start.outcome == "refused":
        return start.exit_code
    if start.lease is not None:
        start.lease.make_inheritable()
    reached("restore.before_exec")
    become(options.command, {**_inherited(), **start.variables})


_PER_START = tuple(f"CACHEPIPE_{name}" for name in ("ROOT", "RESTORED", "START_ID", "ATTACH", "INDEX_DATES"))
"""An outer restore's variables say nothing about this start."""


def _inherited() -> dict[str, str]:
    """Returns what this process was given, without what the interpreter added to it (LC_CTYPE, PEP 538)."""
    kept = {name: value for name, value in os.environ.items() if name not in _PER_START}
    try:
        with open("/proc/self/environ", "rb") as file:
            is_given = b"\0LC_CTYPE=" in b"\0" + file.read()
    except OSError:
        is_given = True
    if not is_given:
        kept.pop("LC_CTYPE", None)
    return kept


def _warm(outcome: RestoreOutcome, common: Mapping[str, str]) -> Start:
    return Start(
        outcome=outcome.outcome,
        exit_code=0,
        reason="; ".join(outcome.notes),
        hint="",
        names=outcome.names,
        statements=outcome.statements,
        bytes=outcome.bytes,
        trust=outcome.trust,
        folder=outcome.folder,
        variables={**outcome.variables, **common},
        lease=outcome.lease,
    )


def _until(limit_s: float, end: float) -> float:
    """Returns the moment of `time.monotonic` until which something is waited for, at the latest `end`, but never at once."""
    now = time.monotonic()
    return now + max(_ACCESS_S, min(limit_s, end - now))


def _cold(error: CachepipeError, options: Options, common: Mapping[str, str], end: float) -> Start:
    """Returns a start with an empty private folder, made by `end`; with `--strict`, or with nothing to start, one with none."""
    is_started = bool(options.command or options.env_file) and not options.is_strict
    folder, lease = _cold_folder(bool(options.command) and not options.env_file, end) if is_started else ("", None)
    reason, named = str(error), folder
    if is_started and not folder and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        named = _likely_folder()
        reason += f"; no scratch place takes an empty private folder, torch is to make {named}"
    variables = {**common, **(folder_variables(named) if named else {})}
    outcome = "cold" if is_started else "refused"
    return Start(outcome, error.exit_code, reason, error.hint, options.names, (), 0, "", folder, variables, lease)


def _likely_folder() -> str:
    """Returns where torch may make its folder, which is private if it can be made at all: torch's default has a name that another
    user can have taken and filled."""
    from cachepipe.adapters.cold_folder import writable_place

    name = f"cachepipe-{os.geteuid()}.{os.urandom(16).hex()}"

    def make() -> str:
        path = os.path.join(writable_place(cachedir.scratch_folders(os.environ)) or "/tmp", name)
        with suppress(OSError):
            cachedir.mkdir_private(path)
        return path

    found = _bounded(make, time.monotonic() + _ACCESS_S)
    return found if isinstance(found, str) else os.path.join("/tmp", name)


def _cold_folder(is_held: bool, end: float) -> tuple[str, Lease | None]:
    """Returns an empty folder and its lease; held by the command that this process becomes, if there is one."""
    from cachepipe.adapters.cold_folder import ColdFolder, cold_folder, sweep_cold

    def make(places: Sequence[str], is_careful: bool) -> ColdFolder | None:
        if is_careful:
            sweep_cold(places, time.time())
        return cold_folder(places, asks_room=is_careful, is_held=is_held and is_careful)

    local = cachedir.scratch_folders({})  # no variable of the user: its folder may be the mount that hangs
    tries = ((cachedir.scratch_folders(os.environ), True, _COLD_S), (local, True, _COLD_S), (local, False, _LAST_S))
    for places, asks_room, limit_s in tries:
        found = _bounded(partial(make, places, asks_room), _until(limit_s, end))
        if isinstance(found, ColdFolder):
            return found
    return "", None


def _line(start: Start, start_id: str, seconds: float) -> str:
    fields = {
        "outcome": start.outcome,
        "name": ",".join(start.names),
        "digest": ",".join(start.statements),
        "bytes": str(start.bytes),
        "seconds": f"{seconds:.3f}",
        "trust": start.trust,
        "store": ",".join(f"{kind}:{count}" for kind, count in _store_counts().items()),
        "folder": start.folder,
        "start": start_id,
        "reason": start.reason,
        "hint": start.hint,
    }
    return "cachepipe restore " + " ".join(f"{name}={_logfmt(value)}" for name, value in fields.items() if value)


def _store_counts() -> dict[str, int]:
    """Returns what went wrong with the store and how often, also where a later try succeeded."""
    module = sys.modules.get("cachepipe.adapters.store")  # a start that asked no store does not import it for this
    return {kind: count for kind, count in sorted(module.COUNTS.items()) if count} if module else {}


def _logfmt(value: str) -> str:
    is_plain = value.isascii() and value.isprintable() and not set(value) & set(' "=\\')
    return value if is_plain else json.dumps(value)


def _print_json(start: Start, start_id: str, seconds: float) -> None:
    tree: dict[str, Any] = {
        "bytes": start.bytes,
        "exit_code": start.exit_code,
        "folder": start.folder,
        "hint": start.hint,
        "names": start.names,
        "outcome": start.outcome,
        "reason": start.reason,
        "seconds": round(seconds, 3),
        "start_id": start_id,
        "statements": start.statements,
        "store": _store_counts(),
        "trust": start.trust,
        "variables": dict(start.variables),
    }
    streams.write(1, json.dumps(tree, sort_keys=True) + "\n")


def _say(line: str) -> None:
    streams.write(2, line + "\n")


def _catch_signals() -> None:
    """SIGTERM and SIGINT during the restore end this process at once, with their exit codes; nothing is started."""

    def end(number: int, _frame: FrameType | None) -> None:
        _say(f'cachepipe restore outcome=refused reason="ended by {signal.Signals(number).name} before the start"')
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
