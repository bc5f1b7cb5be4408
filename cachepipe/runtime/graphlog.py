"""What is remembered of one shape bucket and of one compile while a process is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cachepipe.domain.evidence import GraphEvidence, Work
from cachepipe.domain.phases import Phases

Spans = dict[tuple[str, bool], float]
"""Kind of a timed section (adapters/torch_trace.py), and whether it lay within the backend → seconds."""


@dataclass
class GraphLog:
    """One compile."""

    graph: str
    label: str
    sizes: dict[str, Any] = field(default_factory=dict)
    place: str = ""
    operators: int = 0
    recompile_reason: str = ""
    failure: str = ""
    missed: set[str] = field(default_factory=set)
    """Layers that had no entry for it."""
    spans: Spans = field(default_factory=dict)

    def evidence(self) -> GraphEvidence:
        return GraphEvidence(
            graph=self.graph,
            shape_bucket=self.label,
            place=self.place,
            sizes=self.sizes,
            phases=phases_of_graph(self),
            operators=self.operators,
            recompile_reason=self.recompile_reason,
            failure=self.failure,
        )


@dataclass
class BucketLog:
    """What was recorded while one shape bucket (or no named one: `-`) was called."""

    graphs: list[str] = field(default_factory=list)
    """Compile ids of what became a graph."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Input sizes of the last graph."""
    compiles: dict[str, GraphLog] = field(default_factory=dict)
    graph_breaks: list[str] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    work: Work = field(default_factory=Work)


def phases_of_graph(log: GraphLog) -> Phases:
    """Returns the phases of one compile; what the kernels themselves took is not known here.

    A graph that missed counts what is left of its backend as compile; of one that hit it is the lookup. Loading a graph whose
    inner layer missed is mostly the wait for its kernels' compilers, and counts as compile too.
    """

    def seconds(kind: str, *places: bool) -> float:
        return sum(log.spans.get((kind, place), 0.0) for place in places or (False, True))

    backend = seconds("backend") + seconds("backward")
    load = 0.0 if "fxgraph" in log.missed else min(seconds("load"), backend)
    tune = min(seconds("tune", True), backend)
    rest = max(0.0, backend - load - tune)
    return Phases(
        trace_s=max(0.0, seconds("frame") - seconds("backend")),
        lookup_s=0.0 if log.missed else rest,
        load_s=load,
        compile_s=rest if log.missed else 0.0,
        tune_s=tune + seconds("tune", False),
        capture_s=seconds("capture"),
    )


def phases_of(log: BucketLog, wall_s: float) -> Phases:
    """Returns the phases of calls that took `wall_s` in all, each compile by its own outcome."""
    found = total_phases(log.compiles.values())
    known = found.trace_s + found.lookup_s + found.load_s + found.compile_s + found.tune_s + found.capture_s
    return found + Phases(run_s=max(0.0, wall_s - known))


def total_phases(logs: Iterable[GraphLog]) -> Phases:
    """Returns the sum over compiles."""
    return sum(map(phases_of_graph, logs), Phases())
