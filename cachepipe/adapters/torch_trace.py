"""Reads torch's structured trace in-process: graphs, cache lookups with torch's reasons, phases, breaks, recompiles.

A handler on logger `torch.__trace` never changes a cache key. The AOT component lines exist only while logger
`torch._functorch._aot_autograd.autograd_cache` is at DEBUG; its output is kept from the user's handlers.

Source: torch/_logging/_internal.py (`trace_structured`), _functorch/_aot_autograd/autograd_cache.py,
_inductor/compile_fx.py, _dynamo/utils.py (`dynamo_timed`); checked against torch 2.13.0.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any, Protocol

TRACE_LOGGER = "torch.__trace"
COMPONENT_LOGGERS = ("torch._functorch._aot_autograd.autograd_cache",)
SPANS = frozenset(
    {
        "entire_frame_compile",
        "backend_compile",
        "PyCodeCache.load_by_key_path",
        "entire_backward_compile",
    }
)
_STATES = {"hit": "hit", "miss": "miss", "bypass": "bypass"}
_LAYERS = {"aotautograd_cache_": "aotautograd", "fx_graph_cache_": "fxgraph"}
_COMPONENT = re.compile(r"\[([a-z0-9]+)\] ([^:]+): ?(.*)", re.S)
_TEXT_CHARS = 400
"""Of a component's text that are kept: enough to name both values, small enough for 640 lines a graph."""


class TraceSink(Protocol):
    """Receives trace events in the order of the compile; `graph` is torch's compile id, e.g. `0/1`."""

    def on_graph(self, graph: str, sizes: dict[str, Any]) -> None: ...

    def on_lookup(self, graph: str, layer: str, outcome: str, key: str, reason: str) -> None: ...

    def on_components(self, layer: str, key: str, components: dict[str, list[str]]) -> None: ...

    def on_span(self, graph: str, name: str, seconds: float) -> None: ...

    def on_graph_break(self, reason: str) -> None: ...

    def on_recompile(self, graph: str, reason: str) -> None: ...


class TraceHandler(logging.Handler):
    """Feeds a sink from torch's trace; `install` and `uninstall` leave the loggers as they were."""

    def __init__(self, sink: TraceSink, with_components: bool) -> None:
        super().__init__(logging.DEBUG)
        self._sink = sink
        self._with_components = with_components
        self._open_spans: dict[tuple[str, str], float] = {}
        self._loggers: list[tuple[logging.Logger, int, bool]] = []
        self._silence = logging.NullHandler()

    def install(self) -> None:
        logging.getLogger(TRACE_LOGGER).addHandler(self)
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
        graph = f"{metadata.get('frame_id', '-')}/{metadata.get('frame_compile_id', '-')}"
        payload = getattr(record, "payload", None) or ""
        if "dynamo_output_graph" in metadata:
            sizes = metadata["dynamo_output_graph"].get("sizes", {})
            self._sink.on_graph(graph, input_sizes(sizes if isinstance(sizes, dict) else {}))
        elif "chromium_event" in metadata:
            self._on_chromium(graph, payload)
        elif isinstance(metadata.get("artifact"), dict):
            self._on_artifact(graph, str(metadata["artifact"].get("name", "")), payload)

    def _on_chromium(self, graph: str, payload: str) -> None:
        event = _json_object(payload)
        name = str(event.get("name", ""))
        stamp = event.get("ts")
        if name not in SPANS or not isinstance(stamp, (int, float)):
            return
        if event.get("ph") == "B":
            self._open_spans.setdefault((graph, name), float(stamp))
        elif event.get("ph") == "E":
            begin = self._open_spans.pop((graph, name), None)
            if begin is not None:
                self._sink.on_span(graph, name, (float(stamp) - begin) / 1e6)

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
            reason = reason or detail
        self._sink.on_lookup(graph, layer, state, key, reason[:500])
        lines = info.get("components")
        if self._with_components and isinstance(lines, list):
            self._sink.on_components(layer, key, parse_components(lines))


def parse_components(lines: Iterable[Any]) -> dict[str, list[str]]:
    """Returns name → [hash, text] of torch's component lines `[hash] name: text`."""
    components: dict[str, list[str]] = {}
    for line in lines:
        match = _COMPONENT.match(str(line))
        if match:
            components[match[2]] = [match[1], match[3][:_TEXT_CHARS]]
    return components


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
