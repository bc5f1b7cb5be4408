"""Counts work that torch really does, by wrapping the calls that do it.

torch's own counters are replayed on a cache hit, so they prove nothing; a call that was made does. Only functions that
run while something is benchmarked, tuned, built or loaded are wrapped: a warm call meets none of them.

Source: torch/_inductor/runtime/benchmarking.py, select_algorithm.py, codecache.py, cpp_builder.py,
runtime/triton_heuristics.py, runtime/coordinate_descent_tuner.py; checked against torch 2.11.0 and 2.13.0 (`NAMES`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from cachepipe.domain.evidence import Uncounted, Work
from cachepipe.importing import when_imported

NAMES: tuple[tuple[str, str, str], ...] = (
    ("torch._inductor.runtime.benchmarking", "Benchmarker.benchmark_cpu", "benchmarks"),
    ("torch._inductor.runtime.benchmarking", "TritonBenchmarker.benchmark_gpu", "benchmarks"),
    ("torch._inductor.runtime.benchmarking", "InductorBenchmarker.benchmark_gpu", "benchmarks"),
    ("torch._inductor.select_algorithm", "AlgorithmSelectorCache.benchmark", "tuning_runs"),
    ("torch._inductor.runtime.coordinate_descent_tuner", "CoordescTuner.autotune", "tuning_runs"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner.autotune_to_one_config", "tuning_runs"),
    ("torch._inductor.cudagraph_trees", "CUDAGraphNode._record", "graph_captures"),
    ("torch._inductor.compile_worker.subproc_pool", "SubprocPool.submit", "worker_kernels"),
    ("torch._inductor.cpp_builder", "run_compile_cmd", "native_builds"),
    ("torch._inductor.codecache", "CppCodeCache._load_library", "native"),
    ("torch._inductor.codecache", "PersistentCache.lookup", "tuning"),
    ("torch._inductor.cpu_vec_isa", "VecISA._probe_load", ""),
)
"""Module, attribute path, and what is not counted without it: the field of `Work` that one outermost call adds to, or a layer's
lookups; empty: nothing. A test fails when one goes away."""


_NAME_CHARS = 256
WORKER_COMPILE = "_worker_compile_triton"
"""Of torch._inductor.runtime.compile_tasks: what a compile worker is told to do for a Triton kernel."""


class WorkSink(Protocol):
    """Receives what was counted; called from any thread."""

    def on_work(self, field: str, what: str) -> None:
        """One unit of work was done; `what` names the kernel or object."""

    def on_layer_lookup(self, layer: str, is_hit: bool, key: str) -> None:
        """One lookup in the layer `native`, `tuning` or `triton` ended."""


class WorkCounter:
    """Wraps the functions of `NAMES` while installed; what a name that this torch does not have would count is `missing`."""

    def __init__(self, sink: WorkSink) -> None:
        self._sink = sink
        self._undo: list[Callable[[], None]] = []
        self._depth = threading.local()
        self._built: set[str] = set()
        self.missing: list[Uncounted] = []

    def install(self) -> None:
        """Wraps what is imported now, and the rest as soon as torch imports it: nothing is imported by us."""
        special = {
            "run_compile_cmd": self._wrap_build,
            "CppCodeCache._load_library": self._wrap_load,
            "PersistentCache.lookup": self._wrap_tuning_lookup,
            "VecISA._probe_load": self._wrap_probe,
            "SubprocPool.submit": self._wrap_submit,
        }
        for module, path, field in NAMES:
            wrap = special.get(path) or functools.partial(self._wrap_counted, field=field)
            self._undo.append(when_imported(module, functools.partial(self._replace, path=path, wrap=wrap, kind=field)))
        self._undo.append(when_imported("triton.knobs", self._install_triton))

    def uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, module: ModuleType, path: str, wrap: Callable[[Any], Any], kind: str) -> None:
        owner: Any = module
        *parents, name = path.split(".")
        try:
            for parent in parents:
                owner = getattr(owner, parent)
            original = vars(owner)[name]
        except (AttributeError, KeyError):
            if kind:
                self.missing.append(Uncounted(kind, f"{module.__name__}.{path}"))
            return
        is_classmethod = isinstance(original, classmethod)
        function = original.__func__ if is_classmethod else original
        wrapped = functools.wraps(function)(wrap(function))
        setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)
        self._undo.append(lambda: setattr(owner, name, original))

    def _install_triton(self, knobs: ModuleType) -> None:
        compilation: Any = getattr(knobs, "compilation", None)
        if not hasattr(compilation, "listener"):
            self.missing.append(Uncounted("triton_compiles", f"{knobs.__name__}.compilation.listener"))
            return
        before = compilation.listener

        def listener(**facts: Any) -> None:
            is_hit, name = bool(facts.get("cache_hit")), str(getattr(facts.get("src"), "name", ""))
            self._sink.on_layer_lookup("triton", is_hit, name[:_NAME_CHARS])
            if not is_hit:
                self._sink.on_work("triton_compiles", name)
            if before is not None:
                before(**facts)

        compilation.listener = listener
        self._undo.append(lambda: setattr(compilation, "listener", before))

    def _wrap_counted(self, function: Callable[..., Any], field: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            depth = getattr(self._depth, field, 0)
            if depth == 0:
                self._sink.on_work(field, _name_of(args))
            setattr(self._depth, field, depth + 1)
            try:
                return function(*args, **kwargs)
            finally:
                setattr(self._depth, field, depth)

        return counted

    def _wrap_build(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def build(cmd_line: str, cwd: str) -> Any:
            words = shlex.split(cmd_line)
            output = words[words.index("-o") + 1] if "-o" in words[:-1] else cmd_line
            self._built.add(output)
            self._sink.on_work("native_builds", output.rpartition("/")[2])
            return function(cmd_line, cwd)

        return build

    def _wrap_load(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def load(cls: Any, path: str, key: str) -> Any:
            self._sink.on_layer_lookup("native", path not in self._built, key)
            return function(cls, path, key)

        return load

    def _wrap_submit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def submit(pool: Any, job: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(job, "__name__", "") == WORKER_COMPILE:
                self._sink.on_work("worker_kernels", "")
            return function(pool, job, *args, **kwargs)

        return submit

    def _wrap_probe(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def probe(isa: Any, output_path: str) -> Any:
            is_loadable = function(isa, output_path)
            if not is_loadable:
                # never pack it: a restored probe object stands for one that was loaded (runtime/backports.py)
                with contextlib.suppress(OSError):
                    os.unlink(output_path)
            return is_loadable

        return probe

    def _wrap_tuning_lookup(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def lookup(cache: Any, choices: Any, op: str, inputs: str, benchmark: Any, *rest: Any, **named: Any) -> Any:
            is_tuned = False

            def timed(*args: Any, **kwargs: Any) -> Any:
                nonlocal is_tuned
                is_tuned = True
                return benchmark(*args, **kwargs)

            try:
                return function(cache, choices, op, inputs, timed if benchmark else None, *rest, **named)
            finally:
                if benchmark:
                    self._sink.on_layer_lookup("tuning", not is_tuned, f"{op} {inputs}"[:512])

        return lookup


def _name_of(args: tuple[Any, ...]) -> str:
    """Returns a readable name of what is tuned: choices with their input sizes, or a Triton kernel's name."""
    if len(args) >= 3 and isinstance(args[1], (list, tuple)) and args[1] and hasattr(args[1][0], "name"):
        names = sorted({str(choice.name) for choice in args[1]})
        sizes = [str(list(node.get_size())) for node in args[2] if hasattr(node, "get_size")]
        return f"{'|'.join(names)} {'x'.join(sizes)}"[:256]
    for arg in args[:2]:
        function = getattr(arg, "fn", None)
        if function is not None:
            return str(getattr(function, "__name__", function))[:256]
    return ""


def add_work(work: Work, field: str, amount: int = 1) -> Work:
    """Returns `work` with one field increased."""
    values = {name: getattr(work, name) for name in work.__dataclass_fields__}
    values[field] += amount
    return Work(**values)
