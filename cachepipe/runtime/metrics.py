"""Prometheus metrics of a service process, read from the recorder when they are asked for (extra `[prometheus]`).

    cachepipe.register_metrics()      # then serve prometheus_client's registry as the service does already

Nothing is counted on a call: a scrape reads what the recorder holds. In prometheus_client's multiprocess mode, where only
files are merged, each worker serves its own registry instead.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cachepipe.domain.evidence import LAYERS, layer_counts_of
from cachepipe.domain.index import parse_timestamp
from cachepipe.errors import IntegrityError, UsageError
from cachepipe.runtime import attach as attaching
from cachepipe.runtime.details import differing_settings, expected_graphs
from cachepipe.runtime.service import statements

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_REGISTERED: weakref.WeakSet[CollectorRegistry] = weakref.WeakSet()
_LOCK = threading.Lock()
OUTCOMES = ("hit", "miss", "bypass")


def register_metrics(registry: CollectorRegistry | None = None) -> None:
    """Adds cachepipe's metrics to a registry: prometheus_client's own, or the given one; attaches if nothing has.

    A registry that has them already keeps them: a service and a library in it may both ask.

    Raises:
        UsageError: prometheus_client is not installed, or the registry holds other metrics of these names.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise UsageError("prometheus_client is not installed", hint="pip install 'cachepipe[prometheus]'") from error
    attaching.attach()
    chosen = REGISTRY if registry is None else registry
    with _LOCK:
        if chosen in _REGISTERED:
            return
        try:
            chosen.register(_Collector())
        except ValueError as error:
            hint = "register another registry's metrics once, by cachepipe alone"
            raise UsageError(f"the registry cannot take cachepipe's metrics: {error}", hint=hint) from error
        _REGISTERED.add(chosen)


class _Collector:
    """Given to a registry, which calls `collect` at every scrape."""

    def collect(self) -> Iterable[Metric]:
        attached = attaching.state()
        if attached is None:
            return
        yield from _start(attached)
        yield from _counts(attached)
        yield from _late(attached)


def _start(attached: attaching.Attached) -> Iterable[Metric]:
    from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

    found = statements()
    facts = {
        "release": ",".join(one.release for one in found),
        "artifact": ",".join(one.artifact for one in found),
        "digest": os.environ.get("CACHEPIPE_RESTORED", "")[:12],
        "outcome": "restored" if found else "cold",
        "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
    }
    yield InfoMetricFamily("cachepipe_start", "What this process was started with.", facts)
    rows = (
        ("ready", "1 once every first call is done.", float(attached.is_ready)),
        ("ready_seconds", "Seconds from attaching until ready; 0 before.", attached.ready_s),
        ("expected_graphs", "Graphs that the restored entries hold.", float(expected_graphs())),
        (
            "setting_differences",
            "Ambient torch settings that are not the builder's.",
            float(len(differing_settings(attached))),
        ),
        ("strict", "1 where a late compile is an error.", float(attached.late_watch.is_strict)),
        ("uncounted", "Kinds of work that could not be counted here.", float(len(attached.recorder.uncounted))),
    )
    for name, help_text, value in rows:
        yield GaugeMetricFamily(f"cachepipe_{name}", help_text, value)
    for name, moment in zip(("created", "expires"), _index_dates(), strict=False):
        help_text = f"When the channel's index that chose the artifact {name if name == 'expires' else 'was created'}; absent with a lock file."
        yield GaugeMetricFamily(f"cachepipe_index_{name}_timestamp_seconds", help_text, moment)


def _index_dates() -> list[float]:
    """Returns what restore says of the channel's index: made and ends, seconds since 1970; a channel that nobody renews is seen to age."""
    given = os.environ.get("CACHEPIPE_INDEX_DATES", "")
    try:
        return (
            [parse_timestamp(text, "CACHEPIPE_INDEX_DATES").timestamp() for text in given.split("/")] if given else []
        )
    except IntegrityError:
        return []


def _counts(attached: attaching.Attached) -> Iterable[Metric]:
    recorder = attached.recorder
    layers = layer_counts_of(list(recorder.lookups))
    rows = {(layer, outcome): layers.get(layer, {}).get(outcome, 0) for layer in LAYERS for outcome in OUTCOMES}
    yield _counter("lookups", "Cache lookups by layer and outcome.", ("layer", "outcome"), rows)
    work = {(name,): count for name, count in asdict(recorder.work()).items() if name != "new_files"}
    yield _counter("work", "Work that was really done; on a restored start all are 0.", ("kind",), work)
    phases = {
        (name.removesuffix("_s"),): seconds for name, seconds in asdict(recorder.phases()).items() if name != "run_s"
    }
    yield _counter("phase_seconds", "Seconds of compiles by phase.", ("phase",), phases)
    logs = list(recorder.logs.values())
    yield _counter("graphs", "Graphs traced.", (), {(): sum(len(log.graphs) for log in logs)})
    yield _counter("recompiles", "Compiles because a guard failed.", (), {(): sum(len(log.recompiles) for log in logs)})
    yield _counter("graph_breaks", "Graph breaks.", (), {(): sum(len(log.graph_breaks) for log in logs)})
    yield _counter("events_dropped", "Events beyond what is kept in memory.", (), {(): recorder.dropped})


def _late(attached: attaching.Attached) -> Iterable[Metric]:
    late = attached.late_watch
    yield _counter("late_compiles", "Compiles after ready.", (), {(): late.count})
    yield _counter("late_compile_seconds", "Seconds that calls waited for late compiles.", (), {(): late.seconds})
    yield _counter("late_captures", "CUDA graphs recorded after ready.", (), {(): late.captures})


def _counter(name: str, help_text: str, labels: tuple[str, ...], rows: Mapping[Any, Any]) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(f"cachepipe_{name}", help_text, labels=labels)
    for values, value in rows.items():
        family.add_metric(values, float(value))
    return family
