"""Processes that can be killed, forked from one that has imported everything: a job starts in 10 ms instead of 300.

The zygote is a process of its own, without threads, so that a fork of it is as good as a fresh interpreter. It speaks lines of
JSON: `{"job": NAME, "arguments": […], "environment": {…}}` forks and answers with the process id, `{"wait": PID}` answers with
the exit code (negative: the signal). A job that raised exits with 1, its traceback on stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


class Zygote:
    """Starts the jobs of a module of `tests.support`."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        jobs: str = "store_jobs",
        inherited: Mapping[str, str] = os.environ,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.support.zygote import serve; serve('tests.support.{jobs}')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
            text=True,
            bufsize=1,
        )

    def start(self, job: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> int:
        """Returns the process id of a job; it stays a zombie until `wait`."""
        return self._ask({"job": job, "arguments": arguments, "environment": dict(environment or {})})

    def wait(self, pid: int) -> int:
        """Returns the exit code of a job, negative for a signal, when it has ended."""
        return self._ask({"wait": pid})

    def run(self, job: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> int:
        return self.wait(self.start(job, *arguments, environment=environment))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, question: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def serve(module: str) -> None:
    """Answers questions until stdin ends."""
    jobs = importlib.import_module(module)
    jobs.load_models()
    answers = os.dup(1)
    os.dup2(2, 1)  # what a job prints must not be taken for an answer
    for line in iter(sys.stdin.buffer.readline, b""):
        question = json.loads(line)
        if "wait" in question:
            status = os.waitpid(question["wait"], 0)[1]
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                os.close(answers)
                _run(getattr(jobs, question["job"]), question["arguments"], question["environment"])
        os.write(answers, b"%d\n" % answer)


def _run(job: Any, arguments: list[Any], environment: dict[str, str]) -> None:
    """Never returns: the child must not go on with its parent's loop."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.update(environment)
        job(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
