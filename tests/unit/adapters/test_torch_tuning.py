"""Finished searches: what won, over which baseline; facts in another form are left out and never break a compile."""

from __future__ import annotations

import types
from importlib import import_module
from typing import Any

import pytest

from cachepipe.adapters.torch_tuning import NAMES, TuningWatch
from cachepipe.domain.evidence import TunedKernel


@pytest.mark.parametrize(("module", "path"), NAMES, ids=str)
def test_a_watched_function_of_torch_exists(module: str, path: str) -> None:
    owner, name = path.split(".")
    assert name in vars(getattr(import_module(module), owner))


def config(**kwargs: Any) -> Any:
    return types.SimpleNamespace(kwargs=kwargs, num_warps=4, num_stages=1)


class ExternKernelCaller:
    def __init__(self, name: str) -> None:
        self.name, self.description = name, ""


class TemplateCaller:
    def __init__(self, name: str, description: str) -> None:
        self.name, self.description = name, description


class Node:
    def get_size(self) -> list[int]:
        return [8, 16]


class Sink:
    def __init__(self) -> None:
        self.tuned: list[TunedKernel] = []
        self.lookups: list[tuple[str, bool, str]] = []

    def on_tuned(self, kernel: TunedKernel) -> None:
        self.tuned.append(kernel)

    def on_layer_lookup(self, layer: str, is_hit: bool, key: str) -> None:
        self.lookups.append((layer, is_hit, key))


def watched(wrap: str, function: Any, *args: Any, sink: Sink | None = None) -> tuple[Any, list[TunedKernel]]:
    sink = sink or Sink()
    wrapped = getattr(TuningWatch(sink), wrap)(function)
    return wrapped(*args), sink.tuned


def test_a_choice_is_compared_with_the_librarys_kernel() -> None:
    timings = {
        ExternKernelCaller("mm"): 0.2,
        TemplateCaller("triton_mm_3", "BLOCK_M=64"): 0.1,
        TemplateCaller("bad", ""): float("inf"),
    }
    result, (kernel,) = watched(
        "_wrap_choices", lambda cache, choices, nodes: timings, None, list(timings), [Node(), Node()]
    )
    assert result is timings
    assert (kernel.name, kernel.chosen, kernel.baseline) == ("mm [8, 16]x[8, 16]", "triton_mm_3: BLOCK_M=64", "mm")
    assert (kernel.best_ms, kernel.baseline_ms, kernel.candidates, kernel.gain) == (0.1, 0.2, 3, 2.0)


def test_a_triton_kernels_best_configuration_is_compared_with_its_first() -> None:
    kernel = types.SimpleNamespace(fn=types.SimpleNamespace(__name__="triton_red_0"))

    class Launcher:
        def __init__(self, block: int) -> None:
            self.config = config(XBLOCK=block)

    timings = {Launcher(1): 0.4, Launcher(4): 0.3}
    _, (found,) = watched("_wrap_configs", lambda kernel: timings, kernel)
    assert found.name == "triton_red_0" and found.chosen == "XBLOCK=4, num_warps=4, num_stages=1"
    assert found.baseline.startswith("first: XBLOCK=1") and found.gain == pytest.approx(4 / 3)


def test_coordinate_descent_tells_its_way_from_start_to_best() -> None:
    times = {1: 0.9, 2: 0.5, 4: 0.7}

    def autotune(tuner: Any, func: Any, baseline: Any, timing: Any) -> Any:
        for block in times:
            func(config(XBLOCK=block))
        return config(XBLOCK=2)

    tuner = types.SimpleNamespace(name="triton_poi_1")
    measure = lambda found: times[found.kwargs["XBLOCK"]]  # noqa: E731
    best, (found,) = watched("_wrap_descent", autotune, tuner, measure, config(XBLOCK=1))
    assert best.kwargs == {"XBLOCK": 2}
    assert (found.best_ms, found.baseline_ms, found.candidates) == (0.5, 0.9, 3)
    assert found.name == "triton_poi_1 (coordinate descent)"


@pytest.mark.parametrize("timings", [None, {}, {object(): 0.1}, {ExternKernelCaller("mm"): float("inf")}])
def test_facts_of_another_form_are_left_out_and_the_result_is_passed_on(timings: Any) -> None:
    result, found = watched("_wrap_choices", lambda *args: timings, None, [], [])
    assert result is timings and found == []


def test_case_h2_a_record_that_is_found_is_a_hit_and_a_search_at_run_time_a_miss() -> None:
    sink = Sink()
    cache = types.SimpleNamespace(configs_hash="abc")
    assert watched("_wrap_record", lambda cache, meta, configs: "best", cache, {}, [], sink=sink)[0] == "best"
    assert watched("_wrap_record", lambda cache, meta, configs: None, cache, {}, [], sink=sink)[0] is None
    kernel = types.SimpleNamespace(fn=types.SimpleNamespace(__name__="triton_red_0"))
    watched("_wrap_configs", lambda kernel: {}, kernel, sink=sink)
    assert sink.lookups == [("tuning", True, "abc"), ("tuning", False, "triton_red_0")]


def test_uninstalling_gives_torch_back_unchanged() -> None:
    from torch._inductor.runtime import coordinate_descent_tuner

    before = vars(coordinate_descent_tuner.CoordescTuner)["autotune"]
    watch = TuningWatch(Sink())
    watch.install()
    assert vars(coordinate_descent_tuner.CoordescTuner)["autotune"] is not before
    watch.uninstall()
    assert vars(coordinate_descent_tuner.CoordescTuner)["autotune"] is before and watch.missing == []
