"""Runs command lines with odd standard streams, each in a fork of one process that has imported the command line."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support.release import REPOSITORY, clean_environment

SINKS = ("file", "full", "pipe", "closed")
"""What stdout is: a file, /dev/full, a pipe that nobody reads, nothing at all."""


@dataclass(frozen=True)
class Ran:
    code: int
    out: bytes
    err: str


def run_lines(lines: Sequence[Sequence[str]], sink: str, env: Mapping[str, str] | None = None) -> list[Ran]:
    """Returns what became of each command line; the interpreter is begun anew under `env`, for its encodings."""
    question = json.dumps({"lines": lines, "sink": sink})
    words = [sys.executable, "-c", "from tests.support.odd_streams import serve; serve()"]
    done = subprocess.run(
        words,
        input=question,
        env=clean_environment(PYTHONPATH=str(REPOSITORY), **(env or {})),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return [
        Ran(code, bytes.fromhex(out), bytes.fromhex(err).decode(errors="replace"))
        for code, out, err in json.loads(done.stdout)
    ]


def serve() -> None:
    """Answers on the real stdout; a child leaves by the interpreter's own end, with its last flush."""
    from cachepipe import entrypoint
    from cachepipe.cli import channels, doctor, keygen, release, store, upkeep  # noqa: F401 - once for all forks

    gc.freeze()
    question, answers = json.loads(sys.stdin.read()), []
    encoding, errors = sys.__stdout__.encoding, sys.__stdout__.errors  # type: ignore[union-attr]
    for line in question["lines"]:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(err.fileno(), 2)
                _become(question["sink"], out.fileno(), encoding, errors)
                code = entrypoint.main(line)
                if question["sink"] == "file":
                    sys.stdout.flush()
                    os._exit(code)  # saves the interpreter's end, which nothing could spoil here
                sys.exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            texts = [(stream.seek(0), stream.read().hex())[1] for stream in (out, err)]
        answers.append((code, *texts))
    print(json.dumps(answers))


def _become(sink: str, file: int, encoding: str, errors: str | None) -> None:
    sys.stdout = None  # type: ignore[assignment]
    if sink == "closed":
        os.close(1)
    elif sink == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    else:
        os.dup2(os.open("/dev/full", os.O_WRONLY) if sink == "full" else file, 1)
    if sink != "closed":
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding, errors)
    sys.__stdout__ = sys.stdout  # type: ignore[misc]
