"""Records what compiles do in this process and its compile workers: lookups, phases, breaks, recompiles, real work.

While it records, torch's trace handler, the wrapped functions of `adapters/torch_work.py` and `torch_tuning.py`, and a
log for child processes are installed; `stop` takes them out again, so that a warm call afterwards runs none of our Python
frames. Memory is bounded: events beyond `MAX_EVENTS` are dropped and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from sys import intern
from typing import Any

from cachepipe.adapters.torch_trace import NO_GRAPH, CompileFacts, TraceHandler
from cachepipe.adapters.torch_tuning import TuningWatch
from cachepipe.adapters.torch_work import WorkCounter, add_work
from cachepipe.domain.engine import LAYER
from cachepipe.domain.evidence import CHILD_WORK, GraphEvidence, Lookup, TunedKernel, Uncounted, Work, WorkItem
from cachepipe.domain.phases import Phases
from cachepipe.runtime.childwork import ChildWork
from cachepipe.runtime.events import say
from cachepipe.runtime.graphlog import BucketLog, GraphLog, phases_of, total_phases

__all__ = ["MAX_COMPONENTS", "MAX_EVENTS", "BucketLog", "Recorder", "phases_of"]

MAX_EVENTS = 10_000
"""Of each kind that are kept; a service that compiles more has a fault that these already show."""
MAX_KERNEL_HITS = 2_000
"""Lookups of Triton kernels that hit, which are kept beside the others: every shape bucket loads hundreds, and they say little."""
MAX_COMPONENTS = 256
"""Keys whose 640 components are kept, about 50 kB each since equal texts are shared."""

SUSPECT = (
    "the graph came from the cache, which may hold that of other code (torch's key leaves out what sizes the code asked for): "
    "build again from this code; CACHEPIPE_DISABLE=1 starts without the cache"
)
"""Of a compile that failed after its lookup had hit: pytorch/pytorch#194001, seen with torch 2.13.0."""

_GRAPH_LAYERS = ("aotautograd", "fxgraph")
"""In which torch finds the graph itself, the code of which may then be another's."""
NO_CHILDREN = Uncounted(CHILD_WORK, "no file in memory, or no /proc, through which child processes could tell")
_Item = tuple[str, str, str, str, str]
"""kind, what, graph, shape bucket, process"""


class Recorder:
    """Collects events; safe to feed from any thread."""

    def __init__(self, with_components: bool = False) -> None:
        self._new_locks()
        self._trace = TraceHandler(self, with_components)
        self._counter = WorkCounter(self)
        self._tuning = TuningWatch(self)
        self._children = ChildWork()
        self._deaf: tuple[Uncounted, ...] = ()
        self._label = "-"
        self._graph = ""
        self._items: dict[_Item, int] = {}
        self._kernel_hits = 0
        self._is_recording = False
        self.logs: dict[str, BucketLog] = {}
        self.lookups: list[Lookup] = []
        self.tuned_kernels: list[str] = []
        self.tuned: list[TunedKernel] = []
        self.components: dict[str, dict[str, list[str]]] = {}
        self.dropped = 0

    def _new_locks(self) -> None:
        """Where both are held, `_switching` was taken first; a signal's handler may come back into either."""
        self._switching = threading.RLock()
        self._lock = threading.RLock()

    def start(self) -> None:
        """Installs the handler and the wrappers; torch._inductor must be importable."""
        with self._switching:
            if not self._is_recording:
                self._is_recording = True
                self._counter.install()
                self._tuning.install()
                self._open_children()
                self._trace.install()

    def hear(self) -> None:
        """Before a compile: undoes what the service's logging configuration may have done to torch's trace since `start`."""
        with self._switching:
            if self._is_recording:
                self._trace.hear()

    def stop(self) -> None:
        """Takes everything out again; what was recorded stays readable."""
        with self._switching:
            if self._is_recording:
                self._is_recording = False
                self._trace.uninstall()
                self._tuning.uninstall()
                self._counter.uninstall()
                self._take_children_work()
                self._children.close()

    def after_fork(self) -> None:
        """In the child of a fork: its own compile workers report to it, not to the parent; nobody here lets go of a held lock."""
        self._new_locks()
        self._children = ChildWork()
        if self._is_recording:
            self._open_children()

    def _open_children(self) -> None:
        self._children.open()
        self._deaf = () if self._children.is_open else (NO_CHILDREN,)

    @property
    def uncounted(self) -> tuple[Uncounted, ...]:
        """Returns what is not counted here: this torch lacks the name, or no child process can tell."""
        return tuple(dict.fromkeys([*self._counter.missing, *self._tuning.missing, *self._deaf]))

    @contextmanager
    def shape_bucket(self, label: str) -> Iterator[BucketLog]:
        """Attributes everything inside to one shape bucket."""
        before, self._label = self._label, label
        self.hear()
        with self._lock:
            log = self._log()
        try:
            yield log
        finally:
            self._take_children_work()
            self._label = before

    def work(self) -> Work:
        """Returns the work of all shape buckets, child processes included."""
        with self._lock:
            self._take_children_work()
            return sum((log.work for log in self.logs.values()), Work())

    def count(self, outcome: str) -> int:
        return sum(lookup.outcome == outcome for lookup in self.lookups)

    def phases(self) -> Phases:
        """Returns the phases of every compile so far."""
        with self._lock:
            return total_phases(graph for log in self.logs.values() for graph in log.compiles.values())

    def graphs(self) -> tuple[GraphEvidence, ...]:
        """Returns what is known of every compile, in order."""
        with self._lock:
            compiles = [graph for log in self.logs.values() for graph in log.compiles.values()]
        return tuple(graph.evidence() for graph in compiles if graph.graph != NO_GRAPH)

    def work_items(self) -> tuple[WorkItem, ...]:
        """Returns the work that was done, by name."""
        with self._lock:
            rows = sorted(self._items.items())
        return tuple(WorkItem(kind, what, graph, label, n, process) for (kind, what, graph, label, process), n in rows)

    def evidence(self) -> dict[str, Any]:
        """Returns the fields of `EntryEvidence` that are known here alone."""
        return {
            "graphs": self.graphs(),
            "work_items": self.work_items(),
            "tuned": tuple(self.tuned),
            "uncounted": self.uncounted,
            "dropped": self.dropped,
        }

    def _log(self) -> BucketLog:
        return self.logs.setdefault(self._label, BucketLog())

    def _compile(self, graph: str) -> GraphLog:
        """Returns the log of a compile; beyond the bound one that nobody sees."""
        compiles = self._log().compiles
        found = compiles.get(graph)
        if found is None:
            found = GraphLog(graph, self._label)
            if len(compiles) < MAX_EVENTS:
                compiles[graph] = found
            else:
                self.dropped += 1
        return found

    def _append(self, events: list[Any], event: Any, bound: int = 0) -> None:
        if len(events) >= (bound or MAX_EVENTS):
            self.dropped += 1
            return
        events.append(event)

    def _add_lookup(self, lookup: Lookup) -> None:
        """Keeps a lookup; a kernel that was found takes no other's place, and one too many leaves the evidence whole."""
        if (lookup.layer, lookup.outcome) != ("triton", "hit"):
            self._append(self.lookups, lookup, MAX_EVENTS + self._kernel_hits)
        elif self._kernel_hits < MAX_KERNEL_HITS:
            self._kernel_hits += 1
            self.lookups.append(lookup)

    def _add_work(self, kind: str, what: str, process: str) -> None:
        log = self._log()
        log.work = add_work(log.work, kind)
        item = (kind, what, self._graph, self._label, process)
        if item in self._items or len(self._items) < MAX_EVENTS:
            self._items[item] = self._items.get(item, 0) + 1
        else:
            self.dropped += 1
        if kind in ("tuning_runs", "triton_compiles") and what:
            self._append(self.tuned_kernels, what)

    def _take_children_work(self) -> None:
        with self._lock:  # around the reading too: two readers would both be given the same lines
            was_full = self._children.is_full
            for kind, what in self._children.take():
                self._add_work(kind, what, "child")
            self.dropped += self._children.is_full and not was_full

    def on_work(self, field: str, what: str) -> None:
        with self._lock:
            self._add_work(field, what, "")

    def on_tuned(self, kernel: TunedKernel) -> None:
        with self._lock:
            self._append(self.tuned, kernel)

    def on_layer_lookup(self, layer: str, is_hit: bool, key: str) -> None:
        with self._lock:
            outcome = "hit" if is_hit else "miss"
            self._add_lookup(Lookup(self._label, self._graph, layer, outcome, key))

    def on_engine(self, label: str, is_hit: bool, reason: str) -> None:
        """A native function answered its shape bucket's first call, or (`-`) none was used for a reason."""
        with self._lock:
            outcome = "hit" if is_hit else "miss"
            self._add_lookup(Lookup(self._label if label == "-" else label, "", LAYER, outcome, "", reason))

    def on_capture(self, label: str, reason: str) -> None:
        """A native function was recorded as a CUDA graph, or for a reason will not be: then the function is not what was built."""
        if reason:
            self.on_engine(label, False, reason)
        else:
            self.on_work("graph_captures", f"native function {label}")

    def on_graph(self, graph: str, sizes: dict[str, Any]) -> None:
        with self._lock:
            log = self._log()
            log.sizes = self._compile(graph).sizes = sizes
            self._graph = graph
            if graph not in log.graphs:
                self._append(log.graphs, graph)

    def on_lookup(self, graph: str, layer: str, outcome: str, key: str, reason: str) -> None:
        with self._lock:
            if outcome != "hit":
                self._compile(graph).missed.add(layer)
            self._add_lookup(Lookup(self._label, graph, layer, outcome, key, reason))

    def on_components(self, layer: str, key: str, components: dict[str, list[str]]) -> None:
        with self._lock:
            if len(self.components) < MAX_COMPONENTS:
                shared = {intern(name): [intern(text) for text in pair] for name, pair in components.items()}
                self.components[f"{layer}/{key}"] = shared

    def on_span(self, graph: str, kind: str, seconds: float, is_nested: bool) -> None:
        with self._lock:
            spans = self._compile(graph).spans
            spans[kind, is_nested] = spans.get((kind, is_nested), 0.0) + seconds

    def on_compiled(self, graph: str, facts: CompileFacts) -> None:
        with self._lock:
            log = self._compile(graph)
            log.place, log.operators, log.failure = facts.place, facts.operators, facts.failure
            log.recompile_reason = log.recompile_reason or facts.recompile_reason
            self._graph = ""
            hits = (one for one in self.lookups if one.outcome == "hit" and one.layer in _GRAPH_LAYERS)
            was_found = any(lookup.graph == graph for lookup in hits)
        if facts.has_failed and was_found:
            say("suspect", graph=graph, place=facts.place, reason=facts.failure, problem=SUSPECT)

    def on_graph_break(self, reason: str) -> None:
        with self._lock:
            self._append(self._log().graph_breaks, reason)

    def on_recompile(self, graph: str, reason: str) -> None:
        with self._lock:
            self._compile(graph).recompile_reason = reason
            self._append(self._log().recompiles, f"{graph}: {reason}")
