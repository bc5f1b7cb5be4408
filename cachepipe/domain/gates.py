"""What a restored release must reach before it may be published, decided from evidence alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachepipe.domain.engine import AOT, LAYER
from cachepipe.domain.entry import EntrySpec, bucket_label, traced_bucket
from cachepipe.domain.evidence import CHILD_WORK, RATED, BucketEvidence, EntryEvidence, hit_rate
from cachepipe.domain.remedies import remedy
from cachepipe.errors import VerificationError

_GATED = {
    "min_hit_rate": RATED,
    "max_tuning_runs": ("benchmarks", "tuning_runs", CHILD_WORK),
    "max_compiles": ("triton_compiles", "ptxas_runs", "native_builds", "compiler_runs", CHILD_WORK),
}
"""Gate → kinds of work, or layers, without whose counts it cannot be judged."""
_BREAK_PLACE = re.compile(r"^Graph break in user code at (.+)$", re.MULTILINE)
_BREAK_WORDS = re.compile(r"^(?P<title>.+)\n +Explanation: (?P<why>.+)$", re.MULTILINE)
_BREAK_HINT = re.compile(r"^ +Hint: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class GateLimits:
    """The manifest's `gates`."""

    min_hit_rate: float = 1.0
    """Hits ÷ lookups over all layers, per entry."""
    max_tuning_runs: float = 0
    """Searches and benchmarks, per entry."""
    max_compiles: float = 0
    """Triton compiles and C++ builds, per entry."""
    max_graph_breaks: float = 0
    """Per entry."""
    min_speedup: float = 2.0
    """Σ cold first calls ÷ Σ restored first calls, per entry."""
    max_latency_ratio: float = 1.05
    """Later calls, restored ÷ tuned, per shape bucket on a GPU."""


@dataclass(frozen=True)
class Reference:
    """What the builder measured for one shape bucket."""

    shape_bucket: Mapping[str, int]
    graphs: int
    cold_s: float


def judge(
    limits: GateLimits, spec: EntrySpec, restored: EntryEvidence, references: Sequence[Reference]
) -> tuple[str, ...]:
    """Returns every violation of one entry in words, with shape bucket, gate, limit and value; empty: it passes.

    Args:
        limits: the gates.
        spec: the entry.
        restored: evidence of a process that started from the restored artifact.
        references: the builder's numbers, in the spec's order.
    """
    found: list[str] = []
    covered = {bucket_label(bucket.shape_bucket) for bucket in restored.shape_buckets}
    for shape_bucket in spec.shape_buckets:
        if bucket_label(shape_bucket) not in covered:
            found.append(f"{spec.id} · {bucket_label(shape_bucket)}: was not called")
    for bucket in restored.shape_buckets:
        where = f"{spec.id} · {bucket_label(bucket.shape_bucket)}"
        found += [f"{where}: {problem}" for problem in _bucket_problems(bucket, limits)]
    found += [f"{spec.id}: {problem}" for problem in _entry_problems(limits, restored)]
    found += [f"{spec.id}: {problem}" for problem in _blind_gates(limits, restored)]
    if spec.engine == AOT:
        found += [f"{spec.id} · {problem}" for problem in engine_problems(spec, restored)]
    else:
        found += [f"{spec.id}: {problem}" for problem in _graph_problems(spec, restored, references)]
    found += [f"{spec.id}: {problem}" for problem in _speed_problems(limits, restored, references)]
    return tuple(found)


def _bucket_problems(bucket: BucketEvidence, limits: GateLimits) -> list[str]:
    found = list(bucket.problems)
    if bucket.is_close is False and not found:  # what could not be compared has been named
        found.append(f"outputs differ from eager: max_abs_diff {bucket.max_abs_diff}")
    if bucket.is_close is None:
        found.append("outputs were not compared with eager")
    work = bucket.work
    if work.benchmarks + work.tuning_runs > limits.max_tuning_runs:
        found.append(f"{work.benchmarks} benchmarks and {work.tuning_runs} tuning runs")
    if work.compiles > limits.max_compiles:
        kernels, objects = max(work.triton_compiles, work.ptxas_runs), max(work.native_builds, work.compiler_runs)
        found.append(f"{kernels} Triton compiles and {objects} C++ builds")
    return found


def _entry_problems(limits: GateLimits, restored: EntryEvidence) -> list[str]:
    work = restored.work
    rows = (
        ("max_tuning_runs", limits.max_tuning_runs, work.benchmarks + work.tuning_runs),
        ("max_compiles", limits.max_compiles, work.compiles),
        ("max_graph_breaks", limits.max_graph_breaks, graph_breaks(restored)),
    )
    found = [
        f"{gate}: limit {limit:g}, found {value}{_named(gate, restored)}"
        for gate, limit, value in rows
        if value > limit
    ]
    rate = hit_rate(restored)
    if not rate >= limits.min_hit_rate:  # so that a limit that is no number refuses
        misses = [
            f"{miss.layer} {miss.outcome} at {miss.shape_bucket}"
            for miss in restored.lookups
            if miss.outcome != "hit" and miss.layer in RATED
        ]
        shown = "; ".join(dict.fromkeys(misses[:8])) or "nothing was looked up"
        found.append(f"min_hit_rate: limit {limits.min_hit_rate:g}, found {rate:.3f} ({shown})")
    return found


def _blind_gates(limits: GateLimits, restored: EntryEvidence) -> list[str]:
    """Returns the gates that cannot be judged: what they limit, or what they divide by, was not counted."""
    found = []
    for gate, kinds in _GATED.items():
        missing = [str(one) for one in restored.uncounted if one.kind in kinds]
        if gate == "min_hit_rate":
            missing += [f"{restored.dropped} events that were dropped"] if restored.dropped else []
            missing = missing if limits.min_hit_rate > 0 else []
        if missing:
            found.append(f"{gate}: limit {getattr(limits, gate):g}, could not be counted: {', '.join(missing)}")
    return found


def _named(gate: str, evidence: EntryEvidence) -> str:
    """Returns what was tuned or compiled, by name (H1); empty where nothing is named."""
    kinds = {"max_tuning_runs": ("benchmarks", "tuning_runs"), "max_compiles": ("triton_compiles", "native_builds")}
    names = [item.what for item in evidence.work_items if item.kind in kinds.get(gate, ()) and item.what]
    shown = list(dict.fromkeys(names))
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f" ({', '.join(shown[:8])}{more})" if shown else ""


def graph_breaks(evidence: EntryEvidence) -> int:
    """Returns how many graph breaks a process had."""
    return max(len(evidence.graph_breaks), sum(bucket.graph_breaks for bucket in evidence.shape_buckets))


def _graph_problems(spec: EntrySpec, restored: EntryEvidence, references: Sequence[Reference]) -> list[str]:
    """Fewer graphs than the builder had means that something ran eager; the order of calls differs, so shape buckets
    that are traced alike are counted together."""
    wanted = _graphs_by_trace(spec, {bucket_label(row.shape_bucket): row.graphs for row in references})
    found = _graphs_by_trace(spec, {bucket_label(row.shape_bucket): row.graphs for row in restored.shape_buckets})
    return [
        f"graphs at {where}: built {wanted[where]}, found {found.get(where, 0)}"
        for where in wanted
        if wanted[where] != found.get(where, 0)
    ]


def engine_problems(spec: EntrySpec, restored: EntryEvidence) -> list[str]:
    """Returns where a native function did not answer every call as built: only its own first call counts as a hit, a call that
    fell back left a graph, and a CUDA graph that could not be recorded is a miss."""
    found = []
    graphs = {bucket_label(bucket.shape_bucket): bucket.graphs for bucket in restored.shape_buckets}
    mine = [lookup for lookup in restored.lookups if lookup.layer == LAYER]
    reasons = "; ".join(dict.fromkeys(lookup.reason for lookup in mine if lookup.outcome != "hit"))
    for label in map(bucket_label, spec.shape_buckets):
        outcomes = {lookup.outcome for lookup in mine if lookup.shape_bucket == label}
        if outcomes != {"hit"} or graphs.get(label, 0):
            count = graphs.get(label, 0)
            traced = f"{count} graphs were traced" if count else "later calls are not as built"
            what = traced if "hit" in outcomes else "no native function answered"
            found.append(f"{label}: engine `aot`: {what}: {reasons or 'no reason given'}")
    return found


def _graphs_by_trace(spec: EntrySpec, graphs: Mapping[str, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for shape_bucket in spec.shape_buckets:
        trace = ",".join(f"{name}={size}" for name, size in traced_bucket(spec, shape_bucket)) or "-"
        total[trace] = total.get(trace, 0) + graphs.get(bucket_label(shape_bucket), 0)
    return total


def _speed_problems(limits: GateLimits, restored: EntryEvidence, references: Sequence[Reference]) -> list[str]:
    speedup = speedup_of(references, restored)
    if speedup >= limits.min_speedup:
        return []
    return [f"min_speedup: limit {limits.min_speedup:g}, found {speedup:.2f} (cold ÷ restored, first calls)"]


def latency_problems(limits: GateLimits, spec: EntrySpec, rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns which shape buckets are slower restored than tuned; a CPU shared with others proves nothing.

    Args:
        limits: the gates.
        spec: the entry.
        rows: of the build's latency step; none where it was not measured.
    """
    if spec.device != "cuda":
        return ()
    return tuple(
        f"{spec.id} · {bucket_label(row['shape_bucket'])}: max_latency_ratio: limit {limits.max_latency_ratio:g}, "
        f"found {row['ratio']:.3f} (restored {row['restored_ms']:g} ms, tuned {row['tuned_ms']:g} ms)"
        for row in rows
        if not row["ratio"] <= limits.max_latency_ratio
    )


def speedup_of(references: Sequence[Reference], restored: EntryEvidence) -> float:
    """Returns Σ cold first calls ÷ Σ restored first calls."""
    cold_s = sum(row.cold_s for row in references)
    restored_s = sum(bucket.first_call_s for bucket in restored.shape_buckets)
    return cold_s / restored_s if restored_s > 0 else 0.0


def planned_graph_kinds(spec: EntrySpec) -> int:
    """Returns how many inner and how many outer graph entries an entry leaves at least: one per traced shape bucket."""
    return len({traced_bucket(spec, shape_bucket) for shape_bucket in spec.shape_buckets})


def kind_problems(spec: EntrySpec, kinds: Mapping[str, int]) -> tuple[str, ...]:
    """Returns which kinds of cache entries are fewer than the plan, in words; a partly warm save would show here."""
    wanted = planned_graph_kinds(spec)
    functions = len(spec.shape_buckets) if spec.engine == AOT else 0
    missing = (
        [f"{functions} shape buckets left {kinds.get(LAYER, 0)} `{LAYER}` files"]
        if functions and kinds.get(LAYER, 0) <= functions
        else []
    )
    return (
        *missing,
        *(
            f"{wanted} traced shape buckets left {kinds.get(kind, 0)} `{kind}` entries"
            for kind in ("fxgraph", "aotautograd")
            if kinds.get(kind, 0) < wanted
        ),
    )


def evidence_problems(spec: EntrySpec, evidence: EntryEvidence) -> tuple[tuple[str, str], ...]:
    """Returns (shape bucket, problem) for everything that makes a tune or settle step unusable."""
    found = [
        (bucket_label(bucket.shape_bucket), problem) for bucket in evidence.shape_buckets for problem in bucket.problems
    ]
    found += [
        (bucket_label(bucket.shape_bucket), f"outputs differ from eager: max_abs_diff {bucket.max_abs_diff}")
        for bucket in evidence.shape_buckets
        if bucket.is_close is False and not bucket.problems
    ]
    graphs = {bucket_label(bucket.shape_bucket): bucket.graphs for bucket in evidence.shape_buckets}
    if not sum(graphs.values()):
        return (*found, ("", "no graph was compiled in this process"))
    missing = [label for label in map(bucket_label, spec.shape_buckets) if label not in graphs]
    found += [(label, "was not called") for label in missing]
    empty = [trace for trace, count in _graphs_by_trace(spec, graphs).items() if count == 0]
    told = {label for label, _ in found}
    found += [
        (trace, "no graph was compiled in this shape bucket: its size changes nothing that is compiled")
        for trace in empty
        if trace not in told
    ]
    return tuple(found)


def refuse(violations: Sequence[str], step: str = "") -> None:
    """Refuses if there are violations.

    Args:
        violations: in words.
        step: of a build, which is named and for which the hint says what to do.

    Raises:
        VerificationError: there are violations.
    """
    if violations:
        named = [f"{step}: {violation}" for violation in violations] if step else violations
        raise VerificationError(named, hint=remedy(violations) if step else None)


def break_in_words(reason: str) -> str:
    """Returns a graph break in one line: place, what Dynamo could not trace, why, and its first hint.

    Args:
        reason: Dynamo's text, which goes on with tracebacks through torch's own code.

    Source: torch._dynamo.exc.format_graph_break_message and unimplemented, read in 2.13.0.
    """
    place = _BREAK_PLACE.search(reason)
    what = _BREAK_WORDS.search(reason)
    if place is None or what is None:
        return next((line.strip() for line in reason.splitlines() if line.strip()), "no reason given")
    title = what["title"].removeprefix("Graph Break Reason: ")
    hint = _BREAK_HINT.search(reason)
    return f"{place[1]}: {title}: {what['why']}" + (f" ({hint[1]})" if hint else "")
