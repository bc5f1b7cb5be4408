"""Watches torch's searches: what won, among how many, and what it gained over the baseline; and which records saved one.

Only functions that run while something is tuned or a tuning record is read are wrapped; `adapters/torch_work.py` counts the
same searches. A Triton kernel's record that was found is a hit of the layer `tuning`, a search at run time a miss: what is
not looked up, since it has one configuration, is neither (field case H2).

Source: torch/_inductor/select_algorithm.py (`AlgorithmSelectorCache.benchmark`: choice → ms),
runtime/triton_heuristics.py (`CachingAutotuner.benchmark_all_configs`: launcher → ms),
runtime/coordinate_descent_tuner.py (`CoordescTuner.autotune`), runtime/autotune_cache.py (`AutotuneCache.read_best`: the
recorded configuration or None); checked against torch 2.13.0 (`NAMES`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

from cachepipe.domain.evidence import TunedKernel, Uncounted
from cachepipe.importing import when_imported

NAMES: tuple[tuple[str, str], ...] = (
    ("torch._inductor.select_algorithm", "AlgorithmSelectorCache.benchmark"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner.benchmark_all_configs"),
    ("torch._inductor.runtime.coordinate_descent_tuner", "CoordescTuner.autotune"),
    ("torch._inductor.runtime.autotune_cache", "AutotuneCache.read_best"),
)
"""Module and attribute path; a test fails when one goes away."""
_TEXT_CHARS = 300


class TuningSink(Protocol):
    """Receives what was seen; called from any thread."""

    def on_tuned(self, kernel: TunedKernel) -> None:
        """A search has ended."""

    def on_layer_lookup(self, layer: str, is_hit: bool, key: str) -> None:
        """A tuning record was found, or a kernel was tuned for want of one."""


class TuningWatch:
    """Wraps the functions of `NAMES` while installed."""

    def __init__(self, sink: TuningSink) -> None:
        self._sink = sink
        self._undo: list[Callable[[], None]] = []
        self.missing: list[Uncounted] = []

    def install(self) -> None:
        """Wraps what is imported now, and the rest as soon as torch imports it."""
        wraps = (self._wrap_choices, self._wrap_configs, self._wrap_descent, self._wrap_record)
        for (module, path), wrap in zip(NAMES, wraps, strict=True):
            self._undo.append(when_imported(module, functools.partial(self._replace, path=path, wrap=wrap)))

    def uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, module: ModuleType, path: str, wrap: Callable[[Any], Any]) -> None:
        parent, name = path.split(".")
        owner = getattr(module, parent, None)
        original = vars(owner).get(name) if owner is not None else None
        if original is None:
            self.missing.append(Uncounted("tuning", f"{module.__name__}.{path}"))
            return
        is_classmethod = isinstance(original, classmethod)
        function = original.__func__ if is_classmethod else original
        wrapped = functools.wraps(function)(wrap(function))
        setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)
        self._undo.append(lambda: setattr(owner, name, original))

    def _wrap_choices(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def benchmark(cache: Any, choices: Any, nodes: Any, *rest: Any, **named: Any) -> Any:
            timings = function(cache, choices, nodes, *rest, **named)
            self._tell(lambda: _best_choice(timings, nodes))
            return timings

        return benchmark

    def _wrap_configs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def benchmark_all_configs(kernel: Any, *args: Any, **named: Any) -> Any:
            timings = function(kernel, *args, **named)
            self._sink.on_layer_lookup("tuning", False, _kernel_name(kernel))
            self._tell(lambda: _best_config(kernel, timings))
            return timings

        return benchmark_all_configs

    def _wrap_descent(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def autotune(
            tuner: Any, func: Any, baseline: Any, timing: float | None = None, *rest: Any, **named: Any
        ) -> Any:
            seen: dict[str, float] = {}

            def timed(config: Any) -> Any:
                seen[_config_text(config)] = found = func(config)
                return found

            best = function(tuner, timed, baseline, timing, *rest, **named)
            self._sink.on_layer_lookup("tuning", False, str(getattr(tuner, "name", ""))[:_TEXT_CHARS])
            self._tell(lambda: _descent(tuner, seen, (baseline, timing), best))
            return best

        return autotune

    def _wrap_record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def read_best(cache: Any, *args: Any, **named: Any) -> Any:
            best = function(cache, *args, **named)
            if best is not None:
                self._sink.on_layer_lookup("tuning", True, str(getattr(cache, "configs_hash", ""))[:_TEXT_CHARS])
            return best

        return read_best

    def _tell(self, make: Callable[[], TunedKernel | None]) -> None:
        """Reports one search; facts that this torch gives in another form are left out, never an error of the compile."""
        try:
            kernel = make()
        except (AttributeError, TypeError, ValueError, KeyError):
            return
        if kernel is not None and math.isfinite(kernel.best_ms) and math.isfinite(kernel.baseline_ms):
            self._sink.on_tuned(kernel)


def _kernel_name(kernel: Any) -> str:
    return str(getattr(getattr(kernel, "fn", None), "__name__", ""))[:_TEXT_CHARS]


def _best_choice(timings: Mapping[Any, float], nodes: Any) -> TunedKernel | None:
    finite = {choice: ms for choice, ms in timings.items() if math.isfinite(ms)}
    if not finite:
        return None
    chosen = min(finite, key=lambda choice: finite[choice])
    library = [choice for choice in finite if "Extern" in type(choice).__name__]
    baseline = library[0] if library else next(iter(finite))
    sizes = "x".join(str(list(node.get_size())) for node in nodes if hasattr(node, "get_size"))
    operator = str(baseline.name) if library else str(chosen.name).rpartition("_")[0]
    return TunedKernel(
        name=f"{operator} {sizes}"[:_TEXT_CHARS],
        chosen=_choice_text(chosen),
        best_ms=round(float(finite[chosen]), 6),
        baseline=str(baseline.name)[:_TEXT_CHARS],
        baseline_ms=round(float(finite[baseline]), 6),
        candidates=len(timings),
    )


def _choice_text(choice: Any) -> str:
    described = str(getattr(choice, "description", "") or "")
    return f"{choice.name}{f': {described}' if described else ''}"[:_TEXT_CHARS]


def _best_config(kernel: Any, timings: Mapping[Any, float]) -> TunedKernel | None:
    finite = {launcher: ms for launcher, ms in timings.items() if math.isfinite(ms)}
    if len(finite) < 2:
        return None
    best, first = min(finite, key=lambda launcher: finite[launcher]), next(iter(finite))
    return TunedKernel(
        name=str(kernel.fn.__name__)[:_TEXT_CHARS],
        chosen=_config_text(best.config),
        best_ms=round(float(finite[best]), 6),
        baseline=f"first: {_config_text(first.config)}"[:_TEXT_CHARS],
        baseline_ms=round(float(finite[first]), 6),
        candidates=len(timings),
    )


def _descent(tuner: Any, seen: Mapping[str, float], start: tuple[Any, float | None], best: Any) -> TunedKernel | None:
    baseline, chosen = _config_text(start[0]), _config_text(best)
    before = start[1] if start[1] is not None else seen[baseline]
    return TunedKernel(
        name=f"{tuner.name} (coordinate descent)"[:_TEXT_CHARS],
        chosen=chosen,
        best_ms=round(float(seen.get(chosen, before)), 6),
        baseline=f"start: {baseline}"[:_TEXT_CHARS],
        baseline_ms=round(float(before), 6),
        candidates=len(seen),
    )


def _config_text(config: Any) -> str:
    words = [f"{name}={value}" for name, value in config.kwargs.items()]
    return ", ".join([*words, f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"])[:_TEXT_CHARS]
