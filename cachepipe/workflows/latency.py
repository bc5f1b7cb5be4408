"""Is what a service gets as fast as what tuning found? Two processes alive at once, called in turns.

1 tuned     a process that starts from a copy of the tune step's own folder, every shape bucket called
2 restored  one that restores the packed artifact, beside it
3 measure   per shape bucket: blocks of calls in turns, so that clock and temperature are the same for both; medians

A shape bucket that misses `TARGET` is measured up to twice more, and the best ratio counts: what is slower is slower every time.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from cachepipe.adapters.children import Command, last_lines
from cachepipe.adapters.dialogue import Dialogue
from cachepipe.adapters.packs import moved_copy
from cachepipe.adapters.workdir import EntryDir, write_json
from cachepipe.domain.engine import AOT, engine_folder
from cachepipe.domain.entry import EntrySpec
from cachepipe.domain.job import UNTIMED_CALLS
from cachepipe.domain.record import Json, canonical_bytes, parse_json, to_json
from cachepipe.errors import BuildError, DeadlineError
from cachepipe.workflows.entry_steps import variables_of
from cachepipe.workflows.jobs import BASE_LIMIT_S, BUCKET_LIMIT_S, Shop, worker_count
from cachepipe.workflows.prove import RestoreSource, restore_words
from cachepipe.workflows.quiet_gpu import turn

BLOCKS, CALLS = 10, 20
"""200 calls of each process per shape bucket."""
TARGET, TRIES = 1.02, 3
FACTS = "latency.record"


def latency(shop: Shop, spec: EntrySpec, entry: EntryDir, source: RestoreSource) -> Json:
    """Returns one row per shape bucket: medians of both processes in milliseconds and their ratio; measured once per entry.

    Args:
        shop: where; the root holds the restored folder afterwards.
        spec: the entry.
        entry: has the tune step's tree; gets `latency.record` and the logs.
        source: the packed artifact.

    Raises:
        BuildError: a process ended or did not answer.
    """
    held = entry.read(FACTS)
    if held is not None:
        return parse_json(held, FACTS, 1 << 20)
    folder = shop.work.empty("tuned")
    moved_copy(entry.tree("tune"), str(shop.root.path), folder)
    shop.root.remove()
    # alone on the GPU: a call takes less than a millisecond, any neighbour shows
    with turn(shop, spec, is_alone=True), ExitStack() as stack:
        # 1, 2
        extra = {**variables_of(spec.device, str(folder)), "CACHEPIPE_ROOT": str(folder)}
        pair = (
            stack.enter_context(_process(shop, spec, entry, "tuned", extra)),
            stack.enter_context(_process(shop, spec, entry, "restored", {}, restore_words(shop, source))),
        )
        try:
            for process in pair:
                process.answer("serving")
            # 3
            rows = [_row(spec, index, pair) for index in range(len(spec.shape_buckets))]
        except DeadlineError as error:
            raise BuildError(spec.id, "latency", f"{error}{_why(entry)}") from error
    shop.work.drop("tuned")
    for who in ("tuned", "restored"):
        entry.pending(f"latency-{who}")  # an old one is removed
    entry.write(FACTS, canonical_bytes(rows))
    return rows


def _process(
    shop: Shop, spec: EntrySpec, entry: EntryDir, who: str, extra: dict[str, str], before: Sequence[str] = ()
) -> Dialogue:
    name = f"latency-{who}"
    job = shop.job("latency", spec, entry.pending(name))
    if who == "restored" and spec.engine == AOT:
        job = replace(job, engine=engine_folder(entry.path.name))
    path = entry.path / f"{name}.job"
    write_json(path, to_json(job))
    env = shop.environment(worker_count(), {"PATH": os.environ.get("PATH", os.defpath), **extra})
    limit_s = BASE_LIMIT_S + BUCKET_LIMIT_S * len(spec.shape_buckets)
    worker = [sys.executable, "-m", "cachepipe.adapters.worker", str(path)]
    return Dialogue(Command([*before, *worker], env, shop.work.home, limit_s, entry.log(name)))


def _why(entry: EntryDir) -> str:
    """Returns what both processes left: the error of their evidence, or the last lines of their logs."""
    found = []
    for who in ("tuned", "restored"):
        evidence = entry.read_pending(f"latency-{who}")
        error = evidence.error if evidence is not None else ""
        found.append(f"\n{who}: {error}" if error else last_lines(entry.log(f"latency-{who}")))
    return "".join(found)


def _row(spec: EntrySpec, index: int, pair: tuple[Dialogue, Dialogue]) -> dict[str, Json]:
    best = _measured(spec, index, pair)
    for _ in range(TRIES - 1):
        if best["ratio"] <= TARGET:
            break
        best = min(best, _measured(spec, index, pair), key=lambda row: float(row["ratio"]))
    return best


def _measured(spec: EntrySpec, index: int, pair: tuple[Dialogue, Dialogue]) -> dict[str, Json]:
    found: tuple[list[float], list[float]] = ([], [])
    for block in range(BLOCKS):
        for number in (0, 1) if block % 2 == 0 else (1, 0):
            # the first two calls of a block find the other process's data in the caches
            pair[number].ask(index=index, calls=CALLS + UNTIMED_CALLS)
            found[number].extend(pair[number].answer("timed")["milliseconds"][UNTIMED_CALLS:])
    tuned_ms, restored_ms = map(statistics.median, found)
    return {
        "shape_bucket": dict(spec.shape_buckets[index]),
        "calls": len(found[0]),
        "tuned_ms": round(tuned_ms, 5),
        "restored_ms": round(restored_ms, 5),
        "ratio": round(restored_ms / tuned_ms, 4),
    }
