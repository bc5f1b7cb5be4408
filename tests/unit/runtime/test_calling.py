"""Inputs, preparation and context: the same in every process, and nothing left behind."""

from __future__ import annotations

import dataclasses
import sys
import types
from operator import attrgetter

import pytest
import torch

from cachepipe.adapters.torch_settings import ambient_settings
from cachepipe.domain.entry import Context
from cachepipe.errors import UsageError
from cachepipe.runtime.calling import build_model, calling_context, flatten, gradients, loss, prepare
from cachepipe.runtime.inputs import example_inputs, resolve
from tests.support.jobs import spec_of


def test_example_inputs_are_the_same_bytes_each_time() -> None:
    spec = spec_of("small")
    one, other = example_inputs(spec, {"batch": 3})[0][0], example_inputs(spec, {"batch": 3})[0][0]
    assert one.shape == (3, 8) and torch.equal(one, other)


def test_example_inputs_are_no_inference_tensors_whatever_mode_is_on() -> None:
    with torch.inference_mode():
        tensor = example_inputs(spec_of("small"), {"batch": 3})[0][0]
    assert not tensor.is_inference()


def test_inputs_nest_and_keep_constants_fills_and_bounds() -> None:
    inputs = {
        "tokens": {"shape": ["batch", 4], "dtype": "int64", "low": 5, "high": 9},
        "extra": {"mask": {"shape": ["batch"], "dtype": "bool", "fill": True}, "flag": {"const": None}},
        "pair": [{"shape": [2], "dtype": "float32", "low": 1.0, "high": 2.0}, {"const": 7}],
    }
    args, kwargs = example_inputs(spec_of("small", inputs=inputs, call="kwargs"), {"batch": 2})
    assert args == ()
    assert kwargs["tokens"].min() >= 5 and kwargs["tokens"].max() < 9
    assert kwargs["extra"]["mask"].tolist() == [True, True] and kwargs["extra"]["flag"] is None
    assert (kwargs["pair"][0] >= 1.0).all() and kwargs["pair"][1] == 7


def test_channels_last_reaches_images_and_their_module() -> None:
    spec = spec_of("small", memory_format="channels_last", inputs=[{"shape": ["batch", 3, 4, 4], "dtype": "float32"}])
    image = example_inputs(spec, {"batch": 2})[0][0]
    assert image.is_contiguous(memory_format=torch.channels_last)
    module = prepare(spec, torch.nn.Conv2d(3, 3, 3))
    assert module.weight.is_contiguous(memory_format=torch.channels_last)


def test_preparing_sets_mode_gradients_and_dtype() -> None:
    module = prepare(spec_of("small", dtype="bfloat16"), torch.nn.Linear(2, 2))
    assert module.weight.dtype == torch.bfloat16
    assert not module.training and not module.weight.requires_grad


@pytest.mark.parametrize("grad", ["inference_mode", "no_grad", "grad"])
def test_the_context_sets_everything_and_restores_it(grad: str) -> None:
    spec = spec_of("small", context=Context(grad, "bfloat16", "high", False))
    before = torch.get_float32_matmul_precision()
    with calling_context(spec):
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled() == (grad == "inference_mode")
        assert torch.is_grad_enabled() == (grad == "grad")
    assert torch.get_float32_matmul_precision() == before and torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("wanted", ["highest", "high"])
@pytest.mark.parametrize(
    ("place", "precision"),
    [("cuda.matmul", "tf32"), ("mkldnn.matmul", "bf16"), ("cuda.matmul", "ieee"), ("cudnn.conv", "tf32")],
)
def test_the_context_holds_in_a_service_that_uses_torchs_newer_precision_switches(
    place: str, precision: str, wanted: str
) -> None:
    kinds = {name: attrgetter(name)(torch.backends) for name in ("cuda.matmul", "mkldnn.matmul", "cudnn.conv")}
    at_first = {name: kind.fp32_precision for name, kind in kinds.items()}
    legacy = torch.get_float32_matmul_precision()
    try:
        kinds[place].fp32_precision = precision
        before = ambient_settings("cpu")
        is_mixed = place.endswith("matmul") and precision != "ieee"
        assert (before["matmul precision"] == "mixed") == is_mixed  # where torch itself refuses to tell
        told = {name: kind.fp32_precision for name, kind in kinds.items()}
        with calling_context(spec_of("small", context=Context("inference_mode", None, wanted, False))):
            assert ambient_settings("cpu")["matmul precision"] == torch.get_float32_matmul_precision() == wanted
        if is_mixed:
            assert {name: kind.fp32_precision for name, kind in kinds.items()} == told  # which is what kernels obey
    finally:
        torch.set_float32_matmul_precision(legacy)
        for name, kind in kinds.items():
            kind.fp32_precision = at_first[name]
    assert torch.get_float32_matmul_precision() == legacy


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("outside", [(False, False), (False, True), (True, False), (True, True)])
def test_the_context_sets_determinism_and_leaves_a_service_that_only_warns_warning(
    outside: tuple[bool, bool], is_built: bool
) -> None:
    def state() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    torch.use_deterministic_algorithms(outside[0], warn_only=outside[1])
    try:
        with calling_context(spec_of("small", context=Context("no_grad", None, "highest", is_built))):
            assert state() == (is_built, False)  # all that torch's key holds of it
        assert state() == outside
    finally:
        torch.use_deterministic_algorithms(False)


def test_outputs_of_any_nesting_are_flattened_in_order() -> None:
    @dataclasses.dataclass
    class Output:
        first: torch.Tensor
        rest: dict[str, object]

    tensors = [torch.tensor(float(i)) for i in range(4)]
    nested = Output(tensors[0], {"a": [tensors[1], (tensors[2], "text")], "b": tensors[3], "c": None})
    assert [float(tensor) for tensor in flatten(nested)] == [0.0, 1.0, 2.0, 3.0]


def test_gradients_are_taken_once() -> None:
    module = torch.nn.Linear(2, 1)
    loss(spec_of("small", train=True), module(torch.ones(1, 2))).backward()
    assert len(gradients(module)) == 2 and gradients(module) == []


def test_a_name_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match="math:nothing"):
        resolve("math:nothing")


def test_numbers_are_outputs_too() -> None:
    assert [tensor.item() for tensor in flatten({"count": 3, "share": 0.5, "done": True, "name": "x"})] == [
        3,
        0.5,
        True,
    ]


def test_a_factory_that_returns_nothing_callable_is_named_before_anything_is_compiled() -> None:
    with pytest.raises(UsageError, match="`builtins:dict` returned dict"):
        build_model(dataclasses.replace(spec_of("small"), factory="builtins:dict"))


def test_a_training_entry_without_a_floating_output_asks_for_a_loss() -> None:
    with pytest.raises(UsageError, match="needs `loss`"):
        loss(spec_of("small", train=True), {"ids": torch.tensor([1, 2])})


def test_inputs_that_a_function_draws_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("drawn_inputs")
    module.draw = lambda bucket: ([torch.rand(bucket["batch"])], {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "drawn_inputs", module)
    spec = spec_of("small", inputs="drawn_inputs:draw")
    state = torch.get_rng_state()
    one, other = example_inputs(spec, {"batch": 3})[0][0], example_inputs(spec, {"batch": 3})[0][0]
    assert torch.equal(one, other) and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("result", ["5", "None", "([],)"])
def test_an_inputs_function_that_gives_no_pair_is_named(monkeypatch: pytest.MonkeyPatch, result: str) -> None:
    module = types.ModuleType("odd_inputs")
    exec(f"def give(bucket): return {result}", module.__dict__)
    monkeypatch.setitem(sys.modules, "odd_inputs", module)
    with pytest.raises(UsageError, match="wanted a pair of args and kwargs"):
        example_inputs(spec_of("small", inputs="odd_inputs:give"), {"batch": 3})
