"""The recorder: attribution and phases from torch's events."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

from cachepipe.adapters.torch_trace import COMPONENT_LOGGERS, TRACE_LOGGER
from cachepipe.domain.evidence import LAYERS, Lookup, Uncounted, Work
from cachepipe.runtime import recorder as module
from cachepipe.runtime.childwork import VARIABLE, ChildSink
from cachepipe.runtime.recorder import NO_CHILDREN, Recorder, phases_of
from tests.support.release import REPOSITORY


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


def test_a_service_that_configures_logging_hides_no_compile(tmp_path: Path) -> None:
    """As every service may after it was attached; in a process of its own, since it switches loggers off."""
    settings = tmp_path / "log.ini"
    settings.write_text(
        "[loggers]\nkeys=root\n[handlers]\nkeys=\n[formatters]\nkeys=\n[logger_root]\nlevel=INFO\nhandlers=\n"
    )
    script = f"""
import logging.config
from cachepipe.adapters.torch_trace import TRACE_LOGGER
from cachepipe.runtime.recorder import Recorder
trace = logging.getLogger(TRACE_LOGGER)
trace.setLevel(logging.DEBUG)
recorder = Recorder()
recorder.start()
deeds = (
    lambda: logging.config.dictConfig({{"version": 1}}),
    lambda: logging.config.fileConfig({str(settings)!r}),
    lambda: trace.handlers.clear(),
)
for number, deed in enumerate(deeds):
    deed()
    with recorder.shape_bucket(f"batch={{number}}"):
        trace.debug("", extra={{"metadata": {{"frame_id": number, "frame_compile_id": 0, "dynamo_output_graph": {{}}}}}})
    assert recorder.logs[f"batch={{number}}"].graphs == [f"{{number}}/0"], (number, recorder.logs)
recorder.stop()
recorder.hear()
assert trace.handlers == []
"""
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


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


def test_kernels_that_are_found_take_no_place_from_graphs_and_leave_the_evidence_whole(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 3)
    monkeypatch.setattr(module, "MAX_KERNEL_HITS", 4)
    for number in range(50):
        recorder.on_layer_lookup("triton", True, f"kernel {number}")
    for outcome in ("hit", "miss"):
        trace({"key": "k"}, artifact={"name": f"fx_graph_cache_{outcome}"})
    recorder.on_layer_lookup("triton", False, "one that was compiled")
    for number in range(50):
        recorder.on_layer_lookup("triton", True, f"kernel {number}")
    kept = [(one.layer, one.outcome) for one in recorder.lookups]
    assert kept == [("triton", "hit")] * 4 + [("fxgraph", "hit"), ("fxgraph", "miss"), ("triton", "miss")]
    assert recorder.dropped == 0
    recorder.on_layer_lookup("triton", False, "beyond the bound")
    assert recorder.dropped == 1 and len(recorder.lookups) == 7


def test_compiles_names_of_work_and_components_are_bounded_too(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 3)
    monkeypatch.setattr(module, "MAX_COMPONENTS", 3)
    for number in range(5):
        trace(graph=number, dynamo_output_graph={"sizes": {}})
        recorder.on_work("benchmarks", f"kernel {number}")
        recorder.on_components("fxgraph", str(number), {"a": ["1", "x"]})
        recorder.on_graph_break("reason")
    assert len(recorder.graphs()) == len(recorder.work_items()) == len(recorder.components) == 3
    assert recorder.work().benchmarks == 5 and recorder.dropped >= 4
    assert len(recorder.logs["-"].graph_breaks) == 3


def test_case_h7_capture_and_run_time_tuning_are_phases_of_the_graph_that_they_name(recorder: Recorder) -> None:
    for name, begin in (("CUDAGraphNode.record", 5.0), ("CachingAutotuner.benchmark_all_configs", 6.0)):
        for phase, stamp in (("B", begin), ("E", begin + 0.5)):
            event = {"name": name, "ts": stamp * 1e6, "ph": phase, "args": {"compile_id": "3/0"}}
            logging.getLogger(TRACE_LOGGER).debug(
                "", extra={"metadata": {"chromium_event": {}}, "payload": json.dumps(event)}
            )
    (graph,) = recorder.graphs()
    assert graph.graph == "3/0" and graph.phases.capture_s == graph.phases.tune_s == pytest.approx(0.5)
    assert graph.phases.compile_s == 0.0


def test_a_section_within_one_of_its_own_kind_is_counted_once(recorder: Recorder) -> None:
    events = [("bmm_template_autotuning", "B", 1.0), ("CachingAutotuner.benchmark_all_configs", "B", 1.2)]
    events += [("CachingAutotuner.benchmark_all_configs", "E", 1.4), ("bmm_template_autotuning", "E", 2.0)]
    trace({"name": "backend_compile", "ts": 0, "ph": "B"}, chromium_event={})
    for name, phase, stamp in events:
        trace({"name": name, "ts": stamp * 1e6, "ph": phase}, chromium_event={})
    trace({"name": "backend_compile", "ts": 3e6, "ph": "E"}, chromium_event={})
    trace({"key": "k"}, artifact={"name": "fx_graph_cache_miss"})
    (graph,) = recorder.graphs()
    assert graph.phases.tune_s == pytest.approx(1.0) and graph.phases.compile_s == pytest.approx(2.0)


def test_the_end_of_a_compile_names_its_place_and_why_no_cuda_graph_is_captured(recorder: Recorder) -> None:
    facts = {"co_name": "forward", "co_filename": "/srv/m.py", "co_firstlineno": 3, "graph_op_count": 7}
    trace(compilation_metrics={**facts, "cudagraph_skip_reason": "mutated inputs", "recompile_reason": "guard"})
    (graph,) = recorder.graphs()
    assert (graph.place, graph.operators, graph.failure) == ("forward (/srv/m.py:3)", 7, "mutated inputs")
    assert graph.recompile_reason == "guard"


@pytest.mark.parametrize("layer", LAYERS)
def test_only_a_failed_compile_whose_graph_was_found_makes_the_cache_suspect(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], layer: str
) -> None:
    """A kernel, an object or a search that was found is not the graph: the code that fails is then this program's own."""
    trace(dynamo_output_graph={"sizes": {}})
    if layer in ("aotautograd", "fxgraph"):
        recorder.on_lookup("0/0", layer, "hit", "k", "")
    else:
        recorder.on_layer_lookup(layer, True, "k")
    assert recorder.lookups == [Lookup("-", "0/0", layer, "hit", "k")]
    trace(compilation_metrics={"co_name": "forward", "fail_reason": "it broke"})
    assert ("cachepipe suspect" in capsys.readouterr().err) == (layer in ("aotautograd", "fxgraph"))


def test_a_foreign_or_broken_event_is_passed_over(recorder: Recorder) -> None:
    trace("not json", chromium_event={})
    trace({"name": "backend_compile", "ph": "E", "ts": 1}, chromium_event={})
    trace("[1]", artifact={"name": "fx_graph_cache_hit"})
    trace(artifact={"name": "unknown_thing"})
    assert recorder.count("hit") == 1 and recorder.work() == Work()


def test_a_recorded_native_function_counts_as_a_capture_and_a_failed_one_as_a_miss(recorder: Recorder) -> None:
    with recorder.shape_bucket("batch=8") as log:
        recorder.on_engine("batch=8", True, "")
        recorder.on_capture("batch=8", "")
    assert (log.work.graph_captures, recorder.count("hit"), recorder.count("miss")) == (1, 1, 0)
    recorder.on_capture("batch=8", "no CUDA graph could be recorded: because")
    assert recorder.work().graph_captures == 1
    assert [(one.shape_bucket, one.outcome, one.reason) for one in recorder.lookups][1:] == [
        ("batch=8", "miss", "no CUDA graph could be recorded: because")
    ]


@pytest.mark.parametrize(
    ("module", "path", "kinds"),
    [
        ("torch._inductor.cpp_builder", "run_compile_cmd", ["native_builds"]),
        ("torch._inductor.runtime.benchmarking", "Benchmarker.benchmark_cpu", ["benchmarks"]),
        ("torch._inductor.codecache", "CppCodeCache._load_library", ["native"]),
        ("torch._inductor.runtime.autotune_cache", "AutotuneCache.read_best", ["tuning"]),
        ("torch._inductor.runtime.coordinate_descent_tuner", "CoordescTuner.autotune", ["tuning_runs", "tuning"]),
        ("torch._inductor.cpu_vec_isa", "VecISA._probe_load", []),  # torch 2.11 has none, and it counts nothing
    ],
)
def test_what_a_torch_without_a_name_does_not_let_us_count_is_evidence(
    monkeypatch: pytest.MonkeyPatch, module: str, path: str, kinds: list[str]
) -> None:
    import_module(module)
    monkeypatch.delattr(f"{module}.{path}")
    made = Recorder()
    made.start()
    made.stop()
    assert made.evidence()["uncounted"] == tuple(Uncounted(kind, f"{module}.{path}") for kind in kinds)


def test_a_triton_without_its_listener_leaves_its_compiles_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.knobs", types.ModuleType("triton.knobs"))
    made = Recorder()
    made.start()
    made.stop()
    assert made.uncounted == (Uncounted("triton_compiles", "triton.knobs.compilation.listener"),)


def test_every_kernel_that_triton_looks_for_is_a_lookup_and_a_compile_is_counted_work_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []
    compilation = types.SimpleNamespace(listener=lambda **facts: heard.append(facts["src"].name))
    knobs = types.ModuleType("triton.knobs")
    knobs.compilation = compilation  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    users, made = compilation.listener, Recorder()
    made.start()
    with made.shape_bucket("batch=8"):
        for name, is_hit in (("triton_poi_0", True), ("triton_mm_4", False)):
            src = types.SimpleNamespace(name=name)
            compilation.listener(src=src, metadata={}, metadata_group={}, times=None, cache_hit=is_hit)
    made.stop()
    assert made.lookups == [
        Lookup("batch=8", "", "triton", "hit", "triton_poi_0"),
        Lookup("batch=8", "", "triton", "miss", "triton_mm_4"),
    ]
    assert made.work() == Work(triton_compiles=1) and made.work_items()[0].what == "triton_mm_4"
    assert heard == ["triton_poi_0", "triton_mm_4"] and compilation.listener is users


@pytest.mark.parametrize("call", ["memfd_create", "access"])
def test_children_that_cannot_tell_are_uncounted(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refused(*_: object) -> bool:
        if call == "memfd_create":
            raise PermissionError(1, "seccomp")
        return False  # no /proc

    monkeypatch.setattr(f"cachepipe.runtime.childwork.os.{call}", refused)
    made = Recorder()
    made.start()
    made.stop()
    assert made.uncounted == (NO_CHILDREN,)


def test_a_full_log_of_children_is_told_once_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachepipe.runtime.childwork.MAX_BYTES", 60)
    made = Recorder()
    made.start()
    sink = ChildSink(os.environ[VARIABLE])
    for _ in range(10):
        sink.on_work("benchmarks", "k" * 10)
    assert made.work().benchmarks == 3 and made.work().benchmarks == 3 and made.dropped == 1
    assert [(item.process, item.count) for item in made.work_items()] == [("child", 3)]
    made.stop()
    assert made.dropped == 1


def test_a_graph_break_is_kept_with_torchs_words_for_its_shape_bucket(recorder: Recorder) -> None:
    with recorder.shape_bucket("batch=1"):
        trace("Graph break in user code at /srv/m.py:7", artifact={"name": "dynamo_graph_break_reason"})
    assert recorder.logs["batch=1"].graph_breaks == ["Graph break in user code at /srv/m.py:7"]


def test_the_first_event_of_a_process_is_not_lost_to_a_handler_that_takes_itself_out() -> None:
    class Lazy(logging.Handler):
        """As torch's own: without TORCH_TRACE it is there until the first event."""

        def emit(self, record: logging.LogRecord) -> None:
            logger.removeHandler(self)

    logger = logging.getLogger(TRACE_LOGGER)
    logger.setLevel(logging.DEBUG)
    lazy, made = Lazy(), Recorder()
    logger.addHandler(lazy)
    made._trace.install()
    try:
        trace({"key": "k"}, artifact={"name": "fx_graph_cache_hit"})
    finally:
        made._trace.uninstall()
        logger.removeHandler(lazy)
    assert made.count("hit") == 1


def test_work_within_work_is_counted_once_and_work_that_fails_leaves_no_trace_in_the_next() -> None:
    made = Recorder()

    def benchmark(depth: int) -> None:
        if depth:
            counted(depth - 1)
        raise ValueError

    counted = made._counter._wrap_counted(benchmark, "benchmarks")
    for number in (1, 2):
        with pytest.raises(ValueError):
            counted(2)
        assert made.work().benchmarks == number


def test_an_object_that_is_loaded_is_a_hit_and_one_that_was_built_here_a_miss() -> None:
    made = Recorder()
    made._counter._wrap_build(lambda cmd_line, cwd: None)("g++ a.cpp -o /cache/cb/built.so", "/")
    load = made._counter._wrap_load(lambda cls, path, key: path)
    assert [load(None, f"/cache/cb/{name}.so", name) for name in ("found", "built")] != []
    assert [(one.layer, one.outcome, one.key) for one in made.lookups] == [
        ("native", "hit", "found"),
        ("native", "miss", "built"),
    ]
    assert made.work() == Work(native_builds=1) and made.work_items()[0].what == "built.so"


@pytest.mark.parametrize("propagates", [True, False])
def test_after_the_end_torchs_loggers_are_as_they_were(propagates: bool) -> None:
    loggers = [logging.getLogger(name) for name in (TRACE_LOGGER, *COMPONENT_LOGGERS)]
    inner = loggers[1]
    inner.setLevel(logging.WARNING)
    inner.propagate = propagates
    before = [(one.level, one.propagate, list(one.handlers)) for one in loggers]
    made = Recorder(with_components=True)
    try:
        made.start()
        assert made._trace in loggers[0].handlers and inner.isEnabledFor(logging.DEBUG) and not inner.propagate
        made.stop()
        assert [(one.level, one.propagate, list(one.handlers)) for one in loggers] == before
    finally:
        made.stop()
        inner.propagate = True
        inner.setLevel(logging.NOTSET)
