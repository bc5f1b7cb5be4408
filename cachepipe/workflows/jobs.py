"""Runs one job in a child process and says in words why it failed.

1 write the job, start the worker (or a command that becomes the worker)
2 follow its progress
3 read its evidence, whatever the exit status was
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cachepipe.adapters.children import Command, compile_workers, last_lines, run_child, worker_environment
from cachepipe.adapters.execute import NOT_HELD
from cachepipe.adapters.folders import require_room
from cachepipe.adapters.progress import Progress
from cachepipe.adapters.torch_names import RECOMPILE_LIMIT
from cachepipe.adapters.workdir import BuildRoot, EntryDir, WorkDir, write_json
from cachepipe.domain.entry import EntrySpec
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.job import Job
from cachepipe.domain.record import to_json
from cachepipe.domain.remedies import remedy
from cachepipe.errors import BuildError, DeadlineError, UsageError

BASE_LIMIT_S = 600.0
"""Imports, the factory (which may load weights), and the exit."""
BUCKET_LIMIT_S = 1800.0
"""Max-autotune of a large model takes minutes per shape bucket; half an hour means that it hangs."""
MIN_CALLS = 3
"""cudagraphs record at the second call and replay at the third."""
_FIRST_GUARD = re.compile(r'[\[\s"]*(.+?)(?:\\n|\n|",|"\s*\]|$)', re.S)
QUOTED_CHARS = 500
"""Of each line of torch's error: a compiler's command line alone has thousands."""
OURS = UsageError.__name__
"""Of errors that the worker itself raises: their words say all, and its frames are no business of a reader."""


HEADER = "header.i"
"""Object of torch's search for a header that it compiled before; torch/_inductor/codecache.py: `_precompile_header`, 2.11.0 to 2.13.0."""


@dataclass(frozen=True)
class Shop:
    """Where jobs run: folders, search path, the hold on the root."""

    work: WorkDir
    root: BuildRoot
    python_path: tuple[Path, ...]
    progress: Progress
    keeps_tuned: bool = False
    """The tuned tree of every entry stays in its folder, and torch's own bundle beside it, for comparison."""
    allows_noisy: bool = False
    """A GPU that is not quiet while kernels are timed is worth a warning only."""

    def environment(self, workers: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return worker_environment(self.work.home, workers, extra)

    def job(self, step: str, spec: EntrySpec, result: Path) -> Job:
        """Returns the job of one step: every shape bucket in the manifest's order."""
        return Job(
            step=step,
            spec=spec,
            bucket_order=tuple(range(len(spec.shape_buckets))),
            calls_per_bucket=MIN_CALLS,
            python_path=tuple(str(folder) for folder in self.python_path),
            result=str(result),
            root=str(self.root.path),
            compare_with_eager=False,
            record_components=False,
        )


class _Follower:
    """Remembers which shape bucket is being called, for the error's text."""

    def __init__(self) -> None:
        self.shape_bucket = ""

    def line(self, text: str) -> None:
        try:
            event = json.loads(text)
        except ValueError:
            return
        if isinstance(event, dict) and event.get("event") == "bucket_start":
            self.shape_bucket = str(event.get("shape_bucket", ""))


def run_job(
    shop: Shop, job: Job, name: str, entry: EntryDir, env: Mapping[str, str], before: Sequence[str] = ()
) -> EntryEvidence:
    """Returns the evidence of a job that ended without an error; it is still pending in the entry's folder.

    Args:
        shop: where.
        job: what; its `result` is `entry.pending(name)`.
        name: of the step's files: `tune`, `settle-2`, …
        entry: gets job, log and evidence.
        env: the whole environment.
        before: words of a command that becomes the worker, e.g. `cachepipe restore … --`.

    Raises:
        BuildError: the worker died, hung or reported an error; entry, shape bucket and step are named.
        NoRoomError: the worker died, and hardly any space is left.
        Interrupted: SIGINT or SIGTERM.
    """
    # 1
    spec, log, path = job.spec, entry.log(name), entry.path / f"{name}.job"
    log.unlink(missing_ok=True)
    write_json(path, to_json(job))
    worker = [sys.executable, "-m", "cachepipe.adapters.worker", str(path)]
    limit_s = BASE_LIMIT_S + BUCKET_LIMIT_S * len(spec.shape_buckets)
    command = Command([*before, *worker], env, shop.work.home, limit_s, log, Path(job.result))
    # 2
    follower = _Follower()
    estimate_s = shop.work.estimates().get(f"{spec.id} {name}", 0.0)
    try:
        with shop.progress.step(spec.id, name, len(spec.shape_buckets), estimate_s) as step:

            def on_line(text: str) -> None:
                follower.line(text)
                step.line(text)

            status = run_child(command, on_line)
            # 3
            evidence = entry.read_pending(name)
            if evidence is None:  # on a full disk neither result nor log can be written
                require_room(shop.work.path)
                require_room(shop.root.path.parent)
            reason = failure(evidence, status, log)
            if evidence is None or reason:
                hint = "; ".join(filter(None, (remedy([reason]), f"the whole log is {log}")))
                raise BuildError(spec.id, name, reason, shape_bucket=follower.shape_bucket, hint=hint)
    except DeadlineError as error:
        reason, where = f"{error}{last_lines(log)}", follower.shape_bucket
        raise BuildError(spec.id, name, reason, shape_bucket=where, hint=remedy([str(error)])) from error
    shop.work.note_estimate(f"{spec.id} {name}", evidence.ready_s)
    return evidence


def failure(evidence: EntryEvidence | None, status: int, log: Path) -> str:
    """Returns why a worker's evidence cannot be used; empty: it can."""
    if evidence is None:
        return f"{_ended(status)}{last_lines(log)}"
    if not evidence.error:
        return ""
    if NOT_HELD in evidence.error:
        return _compiled_again(evidence)
    if evidence.error_kind == RECOMPILE_LIMIT:
        return _traced_too_often(evidence)
    if evidence.error_kind == OURS:
        return evidence.error.removeprefix(f"{OURS}: ")
    where = evidence.traceback.rpartition(evidence.error.partition("\n")[0])[0]  # the error's own words come last
    where = where.rpartition("\n")[0]  # what is left of the last line is the name of the error's module
    lines = [*evidence.error.rstrip().splitlines(), *(f"    {line}" for line in where.rstrip().splitlines()[-6:])]
    return "\n".join(line[:QUOTED_CHARS] for line in lines)


def _traced_too_often(evidence: EntryEvidence) -> str:
    reasons = [graph.recompile_reason for graph in evidence.graphs if graph.recompile_reason]
    last = (
        _FIRST_GUARD.match(reasons[-1]) if reasons else None
    )  # a JSON list, cut somewhere: the newest guard is its first
    last_words = " ".join(last[1].split())[:QUOTED_CHARS] if last else "not told"
    return f"torch's recompile limit is hit: {len(evidence.graphs)} traces so far; the guard that failed last: {last_words}"


def _compiled_again(evidence: EntryEvidence) -> str:
    """Returns which lookups missed: the compiler's command line, which torch quotes, tells nobody why it was needed."""
    missed = [lookup for lookup in evidence.lookups if lookup.outcome == "miss" and lookup.layer != "native"]
    told = [f"{one.layer} of graph {one.graph}" + (f" ({one.reason})" if one.reason else "") for one in missed]
    native = "a precompiled header" if any(item.what == HEADER for item in evidence.work_items) else "native code"
    which = ", ".join(dict.fromkeys(told)) or native
    return f"torch compiles again, since the artifact does not hold what this call looks up: {which}"


def _ended(status: int) -> str:
    if status >= 0:
        return f"the worker ended with exit code {status} and left no result"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    why = ": out of memory, or killed by hand" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{why}"


def in_order(job: Job, order: Sequence[int]) -> Job:
    """Returns the job with its shape buckets called in another order."""
    return replace(job, bucket_order=tuple(order))


def worker_count() -> int:
    """Returns torch's compile processes for this container; a smaller wish in the environment is respected."""
    wish = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")
    own = compile_workers()
    return min(own, int(wish)) if wish.isdigit() and int(wish) > 0 else own
