"""Inputs, preparation and context: the same in every process, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter

import pytest
import torch

from cachepipe.adapters.torch_settings import ambient_settings, set_matmul_precision
from cachepipe.domain.entry import Context
from cachepipe.errors import UsageError
from cachepipe.runtime.calling import ProcessWide, build_model, calling_context, flatten, gradients, loss, prepare
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


SWITCHES = ("", "cuda.matmul", "mkldnn.matmul", "mkldnn", "cudnn", "cudnn.conv")
"""Below `torch.backends`: everything that tells a precision in the newer way."""


def precisions() -> dict[str, object]:
    """Returns what torch tells of precision in both ways; `mixed` where it refuses to."""
    told: dict[str, object] = {
        name: attrgetter(f"{name}.fp32_precision".lstrip("."))(torch.backends) for name in SWITCHES
    }
    for read in (torch.get_float32_matmul_precision, lambda: torch.backends.cuda.matmul.allow_tf32):
        try:
            told[f"older {len(told)}"] = read()
        except RuntimeError:
            told[f"older {len(told)}"] = "mixed"
    return told


@pytest.fixture
def reset() -> Iterator[Callable[[], None]]:
    """Brings the state in which torch starts; what a test makes of it ends with the test."""

    def fresh() -> None:
        torch.set_float32_matmul_precision("highest")
        for name in ("", "cuda.matmul", "mkldnn.matmul", "mkldnn", "cudnn"):
            (attrgetter(name)(torch.backends) if name else torch.backends).fp32_precision = "none"
        torch.backends.cudnn.conv.fp32_precision = conv

    conv = torch.backends.cudnn.conv.fp32_precision
    fresh()
    yield fresh
    fresh()


def switch(name: str, precision: str) -> Callable[[], None]:
    """Returns what sets a newer switch."""
    return lambda: setattr(attrgetter(name)(torch.backends) if name else torch.backends, "fp32_precision", precision)


def older(precision: str) -> Callable[[], None]:
    """Returns what sets torch's older switch."""
    return lambda: torch.set_float32_matmul_precision(precision)


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


STATES: dict[str, list[Callable[[], None]]] = {
    "untouched": [],
    **{f"older {one}": [older(one)] for one in ("highest", "high", "medium")},
    "tf32 allowed on the GPU": [allow_tf32],
    "tf32 allowed, CPU told": [switch("mkldnn.matmul", "ieee"), allow_tf32],
    **{
        f"newer {name} {one}": [switch(name, one)]
        for name, one in [
            *(("", one) for one in ("ieee", "tf32")),
            *(("cuda.matmul", one) for one in ("ieee", "tf32")),
            *(("mkldnn.matmul", one) for one in ("ieee", "tf32", "bf16")),
            *(("mkldnn", one) for one in ("tf32", "bf16")),
            *(("cudnn", "tf32"), ("cudnn.conv", "ieee")),
        ]
    },
    "medium, told otherwise": [older("medium"), switch("mkldnn.matmul", "tf32")],
    "high, told otherwise": [older("high"), switch("mkldnn.matmul", "bf16"), switch("cuda.matmul", "ieee")],
    "highest, told otherwise": [older("highest"), switch("mkldnn.matmul", "tf32"), switch("cuda.matmul", "tf32")],
}


def untold() -> str:
    """Returns the older switch where the newer ones keep torch from telling it; they are changed for that."""
    switch("cuda.matmul", "ieee")()
    switch("mkldnn.matmul", "ieee")()
    return torch.get_float32_matmul_precision()


@pytest.mark.parametrize("wanted", ["highest", "high", "medium"])
@pytest.mark.parametrize("name", STATES)
def test_whatever_a_service_had_set_of_precision_is_told_alike_after_the_context(
    reset: Callable[[], None], name: str, wanted: str
) -> None:
    for deed in STATES[name]:
        deed()
    hidden = untold()
    reset()
    for deed in STATES[name]:
        deed()
    before = precisions()
    for _ in range(2):
        with calling_context(spec_of("small", context=Context("inference_mode", None, wanted, False))):
            assert ambient_settings("cpu")["matmul precision"] == torch.get_float32_matmul_precision() == wanted
            switched = precisions()["cuda.matmul"]
            assert switched == ("tf32" if wanted != "highest" else "none"), "what a build in a new process has"
        assert precisions() == before
    assert untold() == hidden


@pytest.mark.usefixtures("reset")
def test_after_the_context_a_precision_that_was_set_for_all_of_torch_can_still_be_changed_for_all() -> None:
    switch("", "tf32")()
    with calling_context(spec_of("small")):
        pass
    switch("", "ieee")()
    assert {precisions()[name] for name in ("cuda.matmul", "mkldnn.matmul")} == {"ieee"}


@pytest.mark.usefixtures("reset")
@pytest.mark.parametrize("deed", [older("high"), older("highest"), allow_tf32, switch("mkldnn.matmul", "bf16")])
def test_what_is_set_of_precision_inside_the_context_ends_with_it(deed: Callable[[], None]) -> None:
    before = precisions()
    with calling_context(spec_of("small")):
        deed()
    assert precisions() == before


def held_in_turn(steps: list[tuple[str, str]]) -> list[str]:
    """Each letter is a thread that enters a context (with a precision) or leaves it; returns the precision after each step."""
    seen, threads = [], dict[str, tuple[ThreadPoolExecutor, AbstractContextManager[None]]]()
    for letter, wanted in steps:
        if wanted:
            spec = spec_of("small", context=Context("inference_mode", None, wanted, False))
            threads[letter] = ThreadPoolExecutor(1), calling_context(spec)
            threads[letter][0].submit(threads[letter][1].__enter__).result()
        else:
            thread, context = threads.pop(letter)
            thread.submit(context.__exit__, None, None, None).result()
            thread.shutdown()
        seen.append(torch.get_float32_matmul_precision())
    return seen


@pytest.mark.usefixtures("reset")
@pytest.mark.parametrize(
    ("steps", "seen"),
    [
        ("a=high b=high a b", "high high high highest"),
        ("a=high b=high b a", "high high high highest"),
        ("a=high b=high a c=high b c", "high high high high high highest"),
        ("a=highest b=high b a", "highest high highest highest"),
        ("a=high b=medium b a", "high medium high highest"),
        ("a=high b=medium a b", "high medium medium highest"),
        ("a=high b=medium c=high a b c", "high medium high high high highest"),
    ],
)
def test_requests_at_once_share_the_precision_and_the_last_one_puts_it_back(steps: str, seen: str) -> None:
    before = precisions()
    words = [(letter, wanted) for letter, _, wanted in (step.partition("=") for step in steps.split())]
    assert held_in_turn(words) == seen.split()
    assert precisions() == before


@pytest.mark.usefixtures("reset")
def test_threads_that_enter_and_leave_at_any_time_never_see_another_precision_inside() -> None:
    def request(_: int) -> set[object]:
        found = set()
        for _ in range(200):
            with calling_context(spec_of("small")):
                found.add((torch.get_float32_matmul_precision(), precisions()["cuda.matmul"]))
        return found

    with ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(request, range(4))) == {("highest", "none")}


def ended(child: int) -> bool:
    """Tells whether a forked child ends well and soon."""
    deadline = time.monotonic() + 20
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
    return status[1] == 0


class Value:
    """A setting that is easy to look at; `on_put` runs while it is set."""

    def __init__(self, on_put: Callable[[], None] = lambda: None) -> None:
        self.now, self.on_put = "found", on_put

    def put(self, wanted: str) -> Callable[[], None]:
        before, self.now = self.now, wanted
        self.on_put()
        return lambda: setattr(self, "now", before)


def test_a_lock_that_another_thread_held_at_a_fork_does_not_stop_the_child() -> None:
    shared = ProcessWide(Value().put)
    with shared._lock:
        child = os.fork()
        if not child:
            with shared.held("a"):
                os._exit(0)
    assert ended(child)


def test_a_child_of_a_fork_keeps_what_its_own_thread_holds_and_puts_back_what_others_did() -> None:
    value = Value()
    shared, inside, end = ProcessWide(value.put), threading.Event(), threading.Event()

    def other() -> None:
        with shared.held("theirs"):
            inside.set()
            end.wait(20)

    for holds in (False, True):
        inside.clear()
        end.clear()
        thread = threading.Thread(target=other)
        with shared.held("ours") if holds else nullcontext():
            thread.start()
            assert inside.wait(20)
            child = os.fork()
            if not child:
                os._exit(0 if value.now == ("ours" if holds else "found") else 1)
            assert ended(child)
            end.set()
            thread.join()
        assert value.now == "found"


def test_a_generator_that_the_collector_ends_while_its_thread_takes_a_setting_stops_nothing() -> None:
    value = Value()
    shared = ProcessWide(value.put)

    def requests() -> Iterator[None]:
        with shared.held("a"):
            yield

    def work() -> None:
        for wanted in ("a", "b", "a"):
            suspended = requests()
            next(suspended)
            value.on_put = suspended.close
            with shared.held(wanted):
                assert value.now == wanted
            value.on_put = lambda: None

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and value.now == "found" and not shared._levels


def test_a_setting_that_cannot_be_set_or_is_interrupted_is_held_by_nobody() -> None:
    value = Value()
    shared = ProcessWide(value.put)

    def fail() -> None:
        raise KeyboardInterrupt

    with shared.held("a"):
        value.on_put = fail
        with pytest.raises(KeyboardInterrupt), shared.held("b"):
            pass
        value.on_put = lambda: None
    assert not shared._levels
    with shared.held("c"):
        pass
    assert not shared._levels and not shared._let_go


def test_requests_of_two_settings_that_never_all_end_at_once_leave_no_more_levels_than_there_are_holders() -> None:
    value = Value()
    shared = ProcessWide(value.put)
    last = shared.held("first")
    last.__enter__()
    for number in range(200):
        following = shared.held("ab"[number % 2])
        following.__enter__()
        last.__exit__(None, None, None)
        last = following
        assert len(shared._levels) == 1 and value.now == "ab"[number % 2]
    last.__exit__(None, None, None)
    assert not shared._levels and value.now == "found"


def test_requests_that_a_signal_ends_anywhere_hold_nothing_afterwards() -> None:
    value = Value()
    shared = ProcessWide(value.put)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    ends = 0
    try:
        for number in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 40 * 0.000005)
                while True:
                    with shared.held("a"):
                        pass
            except KeyboardInterrupt:
                ends += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ends == 400
    with shared.held("b"):
        assert value.now == "b"
    assert len(shared._levels) <= 1, "what an interrupt between two steps of Python may leave does not add up"


@pytest.mark.usefixtures("reset")
def test_a_torch_without_the_newer_switches_has_its_older_one_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "backends", types.SimpleNamespace(cuda=types.SimpleNamespace(matmul=object())))
    put_back = set_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "medium"
    put_back()
    assert torch.get_float32_matmul_precision() == before


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
