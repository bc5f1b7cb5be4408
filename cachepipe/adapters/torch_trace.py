"""Reads torch's structured trace in-process: graphs, cache lookups with torch's reasons, phases, breaks, recompiles.

A handler on logger `torch.__trace` never changes a cache key. The AOT component lines exist only while logger
`torch._functorch._aot_autograd.autograd_cache` is at DEBUG; its output is kept from the user's handlers.

Source: torch/_logging/_internal.py (`trace_structured`, `LazyTraceHandler`), _functorch/_aot_autograd/autograd_cache.py,
_inductor/compile_fx.py, _dynamo/utils.py (`dynamo_timed`); checked against torch 2.13.0.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

TRACE_LOGGER = "torch.__trace"
NO_GRAPH = "-/-"
"""Stands for events outside of a compile."""
COMPONENT_LOGGERS = ("torch._functorch._aot_autograd.autograd_cache",)
_SPANS = {
    "entire_frame_compile": "frame",
    "backend_compile": "backend",
    "entire_backward_compile": "backward",
    "PyCodeCache.load_by_key_path": "load",
    "TritonBundler.read_and_emit": "load",
    "CachingAutotuner.benchmark_all_configs": "tune",
    "CachingAutotuner.coordinate_descent_tuning": "tune",
    "CachingAutotuner.combo_sequential_autotune": "tune",
    "CUDAGraphNode.record": "capture",
}
_SPAN_ENDINGS = {"_template_autotuning": "tune", "_template_precompiling": "tune"}
"""torch's name of a timed section → what it is to us; the endings carry the operator's name in front."""
_STATES = {"hit": "hit", "miss": "miss", "bypass": "bypass"}
_LAYERS = {"aotautograd_cache_": "aotautograd", "fx_graph_cache_": "fxgraph"}
_COMPONENT = re.compile(r"\[([a-z0-9]+)\] ([^:]+): ?(.*)", re.S)
_TEXT_CHARS = {"gm": 4000, "aot_config": 32_000}
_OTHER_CHARS = 400
"""Of a component's text that are kept: enough to name both values, small enough for 640 lines a graph."""
_SOURCE_PARTS = re.compile(r"(local_name|global_name|member|index)=(?:'([^']*)'|(\d+))|is_derefed_cell_contents=(True)")
_CONTAINERS = ("_modules", "_parameters", "_buffers")


class CompileFacts(NamedTuple):
    """What torch sums up at the end of a compile."""

    place: str
    """`forward (/srv/model.py:31)`."""
    operators: int
    recompile_reason: str
    failure: str
    has_failed: bool = False
    """The compile raised; a `failure` alone may be a reason not to record a CUDA graph."""


class TraceSink(Protocol):
    """Receives trace events in the order of the compile; `graph` is torch's compile id, e.g. `0/1`."""

    def on_graph(self, graph: str, sizes: dict[str, Any]) -> None: ...

    def on_lookup(self, graph: str, layer: str, outcome: str, key: str, reason: str) -> None: ...

    def on_components(self, layer: str, key: str, components: dict[str, list[str]]) -> None: ...

    def on_span(self, graph: str, kind: str, seconds: float, is_nested: bool) -> None:
        """A section of kind frame, backend, backward, load, tune or capture ended; nested: within a backend or backward."""

    def on_compiled(self, graph: str, facts: CompileFacts) -> None: ...

    def on_graph_break(self, reason: str) -> None: ...

    def on_recompile(self, graph: str, reason: str) -> None: ...


class TraceHandler(logging.Handler):
    """Feeds a sink from torch's trace; `install` and `uninstall` leave the loggers as they were. One thread at a time calls them."""

    def __init__(self, sink: TraceSink, with_components: bool) -> None:
        super().__init__(logging.DEBUG)
        self._sink = sink
        self._with_components = with_components
        self._open_spans: dict[tuple[str, str], list[tuple[str, float]]] = {}
        self._loggers: list[tuple[logging.Logger, int, bool]] = []
        self._silence = logging.NullHandler()

    def hear(self) -> None:
        """Takes the trace logger's place again where a service's own logging took it away: `logging.config.dictConfig` switches
        off every logger that it does not name, and some services empty the handlers of all."""
        logger = logging.getLogger(TRACE_LOGGER)
        logger.disabled = False
        if self not in logger.handlers:
            # the first: torch's own handler removes itself at its first event, by which the one behind it loses that event
            logger.handlers.insert(0, self)

    def install(self) -> None:
        self.hear()
        for name in COMPONENT_LOGGERS if self._with_components else ():
            logger = logging.getLogger(name)
            if logger.isEnabledFor(logging.DEBUG):
                continue
            self._loggers.append((logger, logger.level, logger.propagate))
            logger.addHandler(self._silence)
            logger.setLevel(logging.DEBUG)
            logger.propagate = False

    def uninstall(self) -> None:
        logging.getLogger(TRACE_LOGGER).removeHandler(self)
        for logger, level, is_propagating in self._loggers:
            logger.setLevel(level)
            logger.propagate = is_propagating
            logger.removeHandler(self._silence)
        self._loggers.clear()

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None)
        if not isinstance(metadata, dict):
            return
        graph = _compile_id(metadata)
        payload = getattr(record, "payload", None) or ""
        if "dynamo_output_graph" in metadata:
            sizes = metadata["dynamo_output_graph"].get("sizes", {})
            self._sink.on_graph(graph, input_sizes(sizes if isinstance(sizes, dict) else {}))
        elif "chromium_event" in metadata:
            self._on_chromium(graph, payload)
        elif isinstance(facts := metadata.get("compilation_metrics"), dict):
            self._sink.on_compiled(graph, _facts(facts))
        elif isinstance(metadata.get("artifact"), dict):
            self._on_artifact(graph, str(metadata["artifact"].get("name", "")), payload)

    def _on_chromium(self, graph: str, payload: str) -> None:
        event = _json_object(payload)
        name, stamp = str(event.get("name", "")), event.get("ts")
        kind = span_kind(name)
        if not kind or not isinstance(stamp, (int, float)):
            return
        args = event.get("args")
        if graph == NO_GRAPH and isinstance(args, dict):  # tuning and capture at run time name the graph themselves
            graph = str(args.get("compile_id") or NO_GRAPH).replace("None", NO_GRAPH)
        if event.get("ph") == "B":
            self._open_spans.setdefault((graph, kind), []).append((name, float(stamp)))
            return
        running = self._open_spans.get((graph, kind))
        if event.get("ph") != "E" or not running or running[-1][0] != name:
            return
        _, begin = running.pop()
        if not running:  # a section within one of its own kind is part of it
            del self._open_spans[graph, kind]
            self._sink.on_span(graph, kind, (float(stamp) - begin) / 1e6, self._is_compiling(graph))

    def _is_compiling(self, graph: str) -> bool:
        return (graph, "backend") in self._open_spans or (graph, "backward") in self._open_spans

    def _on_artifact(self, graph: str, name: str, payload: str) -> None:
        if name == "recompile_reasons":
            self._sink.on_recompile(graph, payload[:2000])
        elif name == "dynamo_graph_break_reason":
            self._sink.on_graph_break(payload[:4000])
        elif name == "aotautograd_cache_pickle_failure":
            self._sink.on_lookup(graph, "aotautograd", "bypass", "", f"cannot be pickled: {payload[:500]}")
        for prefix, layer in _LAYERS.items():
            state = _STATES.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if state is not None:
                self._on_cache(graph, layer, state, _json_object(payload))

    def _on_cache(self, graph: str, layer: str, state: str, info: dict[str, Any]) -> None:
        key = str(info.get("key") or "")
        reason = str(info.get("cache_bypass_reason") or "")
        detail = str(info.get("cache_status_detailed") or "")
        if state == "miss" and detail not in ("", "miss"):
            guard = str(info.get("cache_status_guard_expr") or "")
            reason = reason or (f"{detail}: {guard}" if guard else detail)
        self._sink.on_lookup(graph, layer, state, key, reason[:500])
        lines = info.get("components")
        if self._with_components and isinstance(lines, list):
            self._sink.on_components(layer, key, parse_components(lines))


def span_kind(name: str) -> str:
    """Returns what a timed section of torch is to us; empty: nothing."""
    found = _SPANS.get(name)
    return found or next((kind for ending, kind in _SPAN_ENDINGS.items() if name.endswith(ending)), "")


def _compile_id(metadata: dict[str, Any]) -> str:
    """Returns torch's compile id as torch writes it: `0/1`, with compiled autograd `!0/0/1`."""
    if "frame_id" not in metadata and "compiled_autograd_id" not in metadata:
        return NO_GRAPH
    graph = f"{metadata.get('frame_id', '-')}/{metadata.get('frame_compile_id', '-')}"
    backward = metadata.get("compiled_autograd_id")
    return graph if backward is None else f"!{backward}/{graph}"


def _facts(metrics: dict[str, Any]) -> CompileFacts:
    file, line = metrics.get("co_filename") or "?", metrics.get("co_firstlineno") or 0
    failure = metrics.get("fail_reason") or metrics.get("cudagraph_skip_reason") or ""
    return CompileFacts(
        place=f"{metrics.get('co_name') or '?'} ({file}:{line})"[:512],
        operators=int(metrics.get("graph_op_count") or 0),
        recompile_reason=str(metrics.get("recompile_reason") or "")[:2000],
        failure=str(failure)[:2000],
        has_failed=bool(metrics.get("fail_reason")),
    )


def parse_components(lines: Iterable[Any]) -> dict[str, list[str]]:
    """Returns name → [hash, text] of torch's component lines `[hash] name: text`."""
    components: dict[str, list[str]] = {}
    for line in lines:
        match = _COMPONENT.match(str(line))
        if match:
            name, text = match[2], match[3]
            text = source_names(text) if name == "aot_config" else text
            components[name] = [match[1], text[: _TEXT_CHARS.get(name, _OTHER_CHARS)]]
    return components


def source_names(text: str) -> str:
    """Returns torch's AOT configuration with each argument's source as a short path.

    >>> source_names("(0, [AttrSource(base=LocalSource(local_name='self', is_input=True), member='w')], True)")
    '(0, [self.w], True)'
    """
    begin, end = text.find("["), text.rfind(")], ")
    if begin < 0 or end < begin:
        return text
    paths: list[list[str]] = []
    for kind, name, number, is_cell in _SOURCE_PARTS.findall(text[begin:end]):
        if is_cell and paths:
            paths[-1][0] = f"closure:{paths[-1][0]}"
        elif kind in ("local_name", "global_name"):
            paths.append([name if kind == "local_name" else f"global:{name}"])
        elif kind and paths and name not in _CONTAINERS:
            paths[-1].append(name or number)
    return f"{text[:begin]}[{', '.join('.'.join(path) for path in paths)}{text[end + 1 :]}"


def input_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a graph's inputs that are no weights, by the name in the user's call."""
    return {
        name.removeprefix("l_").removesuffix("_"): size
        for name, size in sizes.items()
        if "parameters_" not in name and "buffers_" not in name and name.startswith("l_")
    }


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
