"""The journal of `ci/gpu`: one JSON object a line, appended as it goes; what stands there is not measured again.

    {"key": "bert-base:default · eager · 1", "entry": "bert-base:default", "variant": "eager", "first_calls_s": 0.5, …,
     "device": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2.11.0+cu130", …}, "date": "2026-12-01T00:00:00+00:00"}

Whoever is killed, or finds the disk full, in the midst of a line leaves the begin of one at the file's end: it is taken out
before the next one is written. A whole one without its end of line, as editors leave it, counts. Any other damage is refused, not guessed at. Another invocation may add lines to the same file,
and a person may take some out, at any time: where the whole lines end is looked up anew, under a lock, for each line.
"""

from __future__ import annotations

import fcntl
import json
import math
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

_TEXTS = ("key", "entry", "variant", "device", "driver", "date")


class Damaged(Exception):
    """A journal cannot be read, written or gone on with; the text says which, where, and what to do."""


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a journal; an absent file has none.

    Raises:
        Damaged: it cannot be read, or a line but the begun one at the end is none of ours.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise Damaged(f"{path}: {(error.strerror or str(error)).lower()}: name the journal by --lines") from error
    whole = data[: _whole_bytes(data)].split(b"\n")
    return [_line(text, f"{path}:{number}") for number, text in enumerate(whole, 1) if text.strip()]


def _whole_bytes(data: bytes) -> int:
    """Returns where the begin of a line at the end begins, which was cut off before its last brace; none: the whole size."""
    begun = data.rfind(b"\n") + 1
    try:
        return len(data) if isinstance(json.loads(data[begun:]), dict) else begun
    except (ValueError, RecursionError):
        return begun


def _line(text: bytes, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where}: not a line of JSON ({error}): remove it, and it is measured again") from error
    if not isinstance(line, dict) or any(not isinstance(line.get(name), str) for name in _TEXTS):
        raise Damaged(
            f"{where}: not a measurement with {', '.join(_TEXTS)} as texts: remove it, and it is measured again"
        )
    versions = line.get("versions")
    if not isinstance(versions, dict) or not isinstance(versions.get("torch"), str):
        raise Damaged(f"{where}: names no version of torch: remove it, and it is measured again")
    return line


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _no_number(text)


def told_apart(lines: list[dict[str, Any]]) -> list[str]:
    """Returns what the lines were measured with, each once, in words: one text means that they may stand in one table.

    A line of a failure measured nothing: where no GPU was visible at first, it names none.
    """
    kinds = {f"{line['device']} with torch {line['versions']['torch']}" for line in lines if "error" not in line}
    return sorted(kinds)


class Journal:
    """Lines are added by several threads.

    Raises:
        Damaged: as `read`; or it is another machine's or torch's, whose measurements would be taken for this one's.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.facts, self._lock = path, facts, threading.Lock()
        self.lines = read(path)
        here = told_apart([dict(facts)])
        if others := [text for text in told_apart(self.lines) if text not in here]:
            where = f"{path}: holds measurements of {', '.join(others)}; this is {here[0]}"
            raise Damaged(f"{where}: name another journal and work folder by --lines and --work")

    def has(self, key: str) -> bool:
        return any(line["key"] == key and "error" not in line for line in self.lines)

    def note(self, key: str, **facts: Any) -> None:
        """Appends a line, whole or not at all; raises `Damaged` if it cannot be written."""
        line = {"key": key, **facts, **self.facts, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        data = json.dumps(line, sort_keys=True).encode() + b"\n"
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    file.seek(0)
                    found = file.read()
                    whole = _whole_bytes(found)
                    file.truncate(whole)
                    file.write(b"\n" + data if whole and found[whole - 1 : whole] != b"\n" else data)
            except OSError as error:
                raise Damaged(f"{self.path}: {(error.strerror or str(error)).lower()}: `{key}` is not noted") from error
            self.lines.append(line)
