"""The recorder: attribution and phases from torch's events."""

from __future__ import annotations

import json
import logging

import pytest

from cachepipe.adapters.torch_trace import TRACE_LOGGER
from cachepipe.domain.evidence import Work
from cachepipe.runtime import recorder as module
from cachepipe.runtime.recorder import Recorder, phases_of


def trace(payload: object = None, graph: int = 0, **metadata: object) -> None:
    facts = {"frame_id": graph, "frame_compile_id": 0, **metadata}
    text = payload if isinstance(payload, (str, type(None))) else json.dumps(payload)
    logging.getLogger(TRACE_LOGGER).debug("", extra={"metadata": facts, "payload": text})


def span(name: str, begin_s: float, end_s: float, graph: int = 0) -> None:
    for phase, stamp in (("B", begin_s), ("E", end_s)):
        trace({"name": name, "ts": stamp * 1e6, "ph": phase}, graph, chromium_event={})


@pytest.fixture
def recorder() -> Recorder:
    logging.getLogger(TRACE_LOGGER).setLevel(logging.DEBUG)
    made = Recorder()
    made._trace.install()
    yield made
    made._trace.uninstall()


def test_events_belong_to_the_open_shape_bucket(recorder: Recorder) -> None:
    with recorder.shape_bucket("batch=1"):
        trace(graph=0, dynamo_output_graph={"sizes": {"l_x_": [1, 8], "l_self_modules_a_parameters_weight_": [8, 8]}})
        trace({"key": "k", "cache_bypass_reason": "because"}, artifact={"name": "aotautograd_cache_bypass"})
    trace({"key": "f"}, artifact={"name": "fx_graph_cache_hit"})
    assert recorder.logs["batch=1"].graphs == ["0/0"]
    assert recorder.logs["batch=1"].sizes == {"x": [1, 8]}
    seen = [(lookup.shape_bucket, lookup.layer, lookup.outcome, lookup.reason) for lookup in recorder.lookups]
    assert seen == [("batch=1", "aotautograd", "bypass", "because"), ("-", "fxgraph", "hit", "")]


def test_a_hit_is_divided_into_trace_lookup_load_and_run(recorder: Recorder) -> None:
    with recorder.shape_bucket("b") as log:
        span("entire_frame_compile", 0.0, 2.0)
        span("backend_compile", 1.0, 1.5)
        span("PyCodeCache.load_by_key_path", 1.1, 1.3)
    phases = phases_of(log, 2.5)
    assert (phases.trace_s, phases.lookup_s, phases.load_s) == pytest.approx((1.5, 0.3, 0.2))
    assert phases.compile_s == 0.0 and phases.run_s == pytest.approx(0.5)


def test_a_miss_counts_its_backend_as_compile(recorder: Recorder) -> None:
    with recorder.shape_bucket("b") as log:
        trace({"key": "k"}, artifact={"name": "aotautograd_cache_miss"})
        span("entire_frame_compile", 0.0, 10.0)
        span("backend_compile", 1.0, 9.0)
    assert phases_of(log, 10.0).compile_s == pytest.approx(8.0)


def test_memory_is_bounded_and_what_is_dropped_is_counted(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 3)
    for number in range(5):
        trace({"key": str(number)}, artifact={"name": "fx_graph_cache_hit"})
    assert len(recorder.lookups) == 3 and recorder.dropped == 2


def test_a_foreign_or_broken_event_is_passed_over(recorder: Recorder) -> None:
    trace("not json", chromium_event={})
    trace({"name": "backend_compile", "ph": "E", "ts": 1}, chromium_event={})
    trace("[1]", artifact={"name": "fx_graph_cache_hit"})
    trace(artifact={"name": "unknown_thing"})
    assert recorder.count("hit") == 1 and recorder.work() == Work()
