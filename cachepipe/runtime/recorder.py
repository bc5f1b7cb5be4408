"""Records what compiles do in this process: lookups per graph and layer, phases, breaks, recompiles, real work.

While it records, torch's trace handler and the wrapped functions of `adapters/torch_work.py` are installed; `stop`
takes them out again, so that a warm call afterwards runs none of our Python frames. Memory is bounded: the oldest events
are dropped beyond `MAX_EVENTS` and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cachepipe.adapters.torch_trace import TraceHandler
from cachepipe.adapters.torch_work import WorkCounter, add_work
from cachepipe.domain.evidence import Lookup, Phases, Work

MAX_EVENTS = 10_000
"""Lookups, breaks and recompiles that are kept; a service that compiles more has a fault that these already show."""


@dataclass
class BucketLog:
    """What was recorded while one shape bucket (or no named one: `-`) was called."""

    graphs: list[str] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)
    """Input sizes of the last graph."""
    spans: dict[tuple[str, str], float] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)
    graph_breaks: list[str] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    work: Work = field(default_factory=Work)


class Recorder:
    """Collects events; safe to feed from any thread."""

    def __init__(self, with_components: bool = False) -> None:
        self._lock = threading.Lock()
        self._trace = TraceHandler(self, with_components)
        self._counter = WorkCounter(self)
        self._label = "-"
        self._is_recording = False
        self.logs: dict[str, BucketLog] = {}
        self.lookups: list[Lookup] = []
        self.tuned_kernels: list[str] = []
        self.components: dict[str, dict[str, list[str]]] = {}
        self.dropped = 0

    def start(self) -> None:
        """Installs the handler and the wrappers; torch._inductor must be importable."""
        if not self._is_recording:
            self._is_recording = True
            self._counter.install()
            self._trace.install()

    def stop(self) -> None:
        """Takes everything out again; what was recorded stays readable."""
        if self._is_recording:
            self._is_recording = False
            self._trace.uninstall()
            self._counter.uninstall()

    @property
    def missing_names(self) -> list[str]:
        """Private names that this torch does not have: their work is not counted."""
        return self._counter.missing

    @contextmanager
    def shape_bucket(self, label: str) -> Iterator[BucketLog]:
        """Attributes everything inside to one shape bucket."""
        before, self._label = self._label, label
        try:
            yield self._log()
        finally:
            self._label = before

    def work(self) -> Work:
        """Returns the work of all shape buckets."""
        return sum((log.work for log in self.logs.values()), Work())

    def count(self, outcome: str) -> int:
        return sum(lookup.outcome == outcome for lookup in self.lookups)

    def _log(self) -> BucketLog:
        return self.logs.setdefault(self._label, BucketLog())

    def _append(self, events: list[Any], event: Any) -> None:
        if len(events) >= MAX_EVENTS:
            self.dropped += 1
            return
        events.append(event)

    def on_work(self, field: str, what: str) -> None:
        with self._lock:
            log = self._log()
            log.work = add_work(log.work, field)
            if field in ("tuning_runs", "triton_compiles") and what:
                self._append(self.tuned_kernels, what)

    def on_layer_lookup(self, layer: str, is_hit: bool, key: str) -> None:
        with self._lock:
            outcome = "hit" if is_hit else "miss"
            self._append(self.lookups, Lookup(self._label, "", layer, outcome, key))

    def on_graph(self, graph: str, sizes: dict[str, Any]) -> None:
        with self._lock:
            log = self._log()
            log.sizes = sizes
            if graph not in log.graphs:
                self._append(log.graphs, graph)

    def on_lookup(self, graph: str, layer: str, outcome: str, key: str, reason: str) -> None:
        with self._lock:
            if outcome != "hit":
                self._log().missed.add(graph)
            self._append(self.lookups, Lookup(self._label, graph, layer, outcome, key, reason))

    def on_components(self, layer: str, key: str, components: dict[str, list[str]]) -> None:
        with self._lock:
            if len(self.components) < 512:
                self.components[f"{layer}/{key}"] = components

    def on_span(self, graph: str, name: str, seconds: float) -> None:
        with self._lock:
            spans = self._log().spans
            spans[graph, name] = spans.get((graph, name), 0.0) + seconds

    def on_graph_break(self, reason: str) -> None:
        with self._lock:
            self._append(self._log().graph_breaks, reason)

    def on_recompile(self, graph: str, reason: str) -> None:
        with self._lock:
            self._append(self._log().recompiles, f"{graph}: {reason}")


def phases_of(log: BucketLog, wall_s: float) -> Phases:
    """Returns the phases of calls that took `wall_s` in all.

    A graph that missed counts its whole backend time as compile; one that hit divides it into lookup and load.
    """
    trace = lookup = load = compile_s = 0.0
    for graph in {graph for graph, _ in log.spans}:
        whole = log.spans.get((graph, "entire_frame_compile"), 0.0)
        backend = log.spans.get((graph, "backend_compile"), 0.0)
        backward = log.spans.get((graph, "entire_backward_compile"), 0.0)
        loading = min(log.spans.get((graph, "PyCodeCache.load_by_key_path"), 0.0), backend + backward)
        trace += max(0.0, whole - backend)
        if graph in log.missed:
            compile_s += backend + backward
        else:
            load += loading
            lookup += backend + backward - loading
    return Phases(trace, lookup, load, compile_s, max(0.0, wall_s - trace - lookup - load - compile_s))
