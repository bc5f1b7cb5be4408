"""What a service process tells: one logfmt line per event on stderr, and the same as JSON lines where a file is named.

    cachepipe ready how=ready start=5f… digest=9f… graphs=2 expected_graphs=2 hits=6 misses=0 … seconds=1.42
    {"digest": "9f…", "event": "ready", "graphs": 2, …, "pid": 12, "time": "2026-01-31T12:00:00.123Z"}

`CACHEPIPE_EVENTS=FILE` names the file; every process of the service appends whole lines to it. Two events are in the file
alone, since they are no talk: `evidence` (everything that was recorded, at `ready`) and `compile` (one per compile).
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timezone
from typing import Any

from cachepipe.domain.printable import printable

VARIABLE = "CACHEPIPE_EVENTS"
MAX_FILE_BYTES = 64 << 20
"""Beyond it nothing is appended: a service that compiles for ever must not fill a disk."""

_has_failed = False
_is_full = False


def say(event: str, **facts: Any) -> None:
    """Prints one logfmt line on stderr, and appends the event to the file; neither failing hurts the service."""
    words = " ".join(f"{name}={_quote(str(value))}" for name, value in facts.items())
    _print(f"cachepipe {event} {words}\n")
    note(event, **facts)


def note(event: str, **facts: Any) -> None:
    """Appends an event to the file of `CACHEPIPE_EVENTS`, if one is named."""
    global _has_failed, _is_full  # noqa: PLW0603
    path = os.environ.get(VARIABLE)
    if not path or _has_failed:
        return
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    row = {"event": event, "time": now, "pid": os.getpid(), **facts}
    try:
        data = _line(row)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            was_full, _is_full = _is_full, os.fstat(fd).st_size >= MAX_FILE_BYTES
            if _is_full:
                if not was_full:
                    _tell_problem(path, f"{MAX_FILE_BYTES} bytes are there: no event is appended until it is rotated")
            elif os.write(fd, data) < len(data):  # one call: lines of several processes do not mix
                raise OSError("no room for a whole event: none is appended any more")
        finally:
            os.close(fd)
    except (OSError, ValueError, TypeError) as error:
        _has_failed = True
        _tell_problem(path, error)


def _tell_problem(path: str, problem: object) -> None:
    _print(f"cachepipe events problem={_quote(f'{path}: {problem}')}\n")


def _line(row: dict[str, Any]) -> bytes:
    """Returns the event as one JSON line; a number that JSON does not have is null."""
    try:
        text = json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        tree = json.loads(json.dumps(row, default=str), parse_constant=lambda _word: None)
        text = json.dumps(tree, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="replace") + b"\n"


def _print(line: str) -> None:
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def _quote(value: str) -> str:
    """Returns a logfmt value; what a terminal would obey is escaped, since models and callers choose some of it."""
    if value and value.isprintable() and not any(character in value for character in ' "=\\'):
        return value
    return '"' + printable(value.replace("\\", "\\\\").replace('"', '\\"')) + '"'
