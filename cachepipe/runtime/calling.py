"""How an entry's model is prepared, compiled and called: the one way of builder, prover, verifier and service."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from cachepipe.domain.entry import EntrySpec, traced_bucket
from cachepipe.errors import UsageError
from cachepipe.runtime.inputs import resolve

if TYPE_CHECKING:
    import torch


def build_model(spec: EntrySpec, seed: int = 0) -> Any:
    """Returns what the entry's factory gives, its weights drawn from `seed`.

    Raises:
        UsageError: that is neither a module nor callable.
    """
    import torch

    torch.manual_seed(seed)
    model = resolve(spec.factory)(**spec.args)
    if not callable(model):
        raise UsageError(f"`{spec.factory}` returned {type(model).__name__}: neither an nn.Module nor callable")
    return model


def prepare(spec: EntrySpec, model: Any) -> Any:
    """Returns the model on its device, in its dtype, mode and memory format; an nn.Module is changed in place.

    All of it is part of torch's keys or of the graph; a callable that is no nn.Module is returned as it is.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        return model
    model = model.to(device=spec.device, dtype=getattr(torch, spec.dtype))
    if spec.memory_format == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    model.train(not spec.eval)
    return model.requires_grad_(spec.requires_grad or spec.train)


def compile_model(spec: EntrySpec, model: Any, *, is_served: bool) -> Callable[..., Any]:
    """Returns torch.compile of a prepared model with the entry's mode, options and dynamic.

    `fullgraph` is a demand on the build, and no part of a key. Where the model is served, or proved as it will be, torch answers
    eager what it cannot trace or may not trace once more; with `fullgraph` it would raise, and a request be lost.

    The recompile limit is raised to the number of differently traced shape buckets. `dynamic=False` keeps marked dimensions
    dynamic and all others static; None would make those dynamic too that differ between calls, in the order of the calls.

    Source: torch._dynamo.variables.builder._automatic_dynamic, read in 2.13.0.
    """
    import torch

    from cachepipe.adapters.torch_settings import mode_options, raise_recompile_limit

    raise_recompile_limit(len({traced_bucket(spec, bucket) for bucket in spec.shape_buckets}))
    settings: dict[str, Any] = {"fullgraph": spec.fullgraph and not is_served, "dynamic": spec.dynamic}
    if spec.options:
        settings["options"] = mode_options(spec.mode, spec.options)
    else:
        settings["mode"] = spec.mode
    compiled: Callable[..., Any] = torch.compile(called(spec, model), **settings)
    return compiled


def called(spec: EntrySpec, model: Any) -> Any:
    """Returns the callable of a model that the entry names: the module itself, or one of its methods."""
    return model if spec.method == "forward" else getattr(model, spec.method)


@dataclasses.dataclass
class _Level:
    """A value that some threads hold; those above it on the stack were asked for later."""

    wanted: Any
    put_back: Callable[[], None]
    holders: list[int] = dataclasses.field(default_factory=list)
    """Thread ids, one for each hold."""


class ProcessWide:
    """A setting of the whole process, which several threads hold at once: what the first one found, the last one puts back.

    A request that ended would else take the setting from another that is still computed. A context may end anywhere, also
    where the garbage collector ends a generator while this very thread is in here: what is let go waits for whoever is at it.
    """

    def __init__(self, put: Callable[[Any], Callable[[], None]]) -> None:
        """Args:
        put: sets a value and returns what puts the earlier one back; does nothing where it is so already.
        """
        self._put, self._levels, self._let_go = put, list[_Level](), deque[tuple[_Level, int]]()
        self._lock, self._is_busy = threading.RLock(), False
        os.register_at_fork(after_in_child=self._after_fork)

    @contextmanager
    def held(self, wanted: Any) -> Iterator[None]:
        """Has the value set inside."""
        taken: list[tuple[_Level, int]] = []
        try:
            self._take(wanted, taken)
            yield
        finally:
            self._let_go.extend(taken)
            self._drain()

    def _take(self, wanted: Any, taken: list[tuple[_Level, int]]) -> None:
        with self._lock:
            was_busy, self._is_busy = self._is_busy, True
            try:
                put_back = self._put(wanted)
                if not self._levels or self._levels[-1].wanted != wanted:
                    self._levels.append(_Level(wanted, put_back))
                level, thread = self._levels[-1], threading.get_ident()
                taken.append((level, thread))
                level.holders.append(thread)
            finally:
                self._is_busy = was_busy
        self._drain()

    def _drain(self) -> None:
        with self._lock:
            if self._is_busy:  # this thread, further down: it comes here when it is done
                return
            self._is_busy = True
            try:
                while self._let_go:
                    level, thread = self._let_go.popleft()
                    if thread in level.holders:
                        level.holders.remove(thread)
                    self._pop()
            finally:
                self._is_busy = False

    def _pop(self) -> None:
        """Takes out what nobody holds; from below another level, that one puts back what was there before both."""
        for number in reversed(range(len(self._levels))):
            if self._levels[number].holders:
                continue
            level = self._levels.pop(number)
            if number == len(self._levels):
                level.put_back()
            else:
                self._levels[number].put_back = level.put_back

    def _after_fork(self) -> None:
        """Other threads, and what they held, are not in the child."""
        self._lock, self._is_busy, own = threading.RLock(), False, threading.get_ident()
        for level in self._levels:
            level.holders = [thread for thread in level.holders if thread == own]
        self._pop()


def _put_precision(wanted: str) -> Callable[[], None]:
    from cachepipe.adapters.torch_settings import set_matmul_precision

    return set_matmul_precision(wanted)


def _put_determinism(wanted: bool) -> Callable[[], None]:
    from cachepipe.adapters.torch_settings import set_determinism

    return set_determinism(wanted)


_PRECISION, _DETERMINISM = ProcessWide(_put_precision), ProcessWide(_put_determinism)


@contextmanager
def calling_context(spec: EntrySpec) -> Iterator[None]:
    """Sets grad mode, autocast, matmul precision and determinism as the builder had them; restores them at the end.

    Of matmul precision and determinism, which all threads share, that is when the last thread leaves that holds them alike.
    """
    import torch

    context = spec.context
    grad_modes = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
    with ExitStack() as stack:
        stack.enter_context(_PRECISION.held(context.matmul_precision))
        stack.enter_context(_DETERMINISM.held(context.deterministic))
        stack.enter_context(grad_modes[context.grad]())
        if context.autocast is not None:
            stack.enter_context(torch.autocast(spec.device, dtype=getattr(torch, context.autocast)))
        yield


def call(spec: EntrySpec, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the outputs of one call when the device is done; for a training entry with loss and backward."""
    outputs = call_once(spec, function, args, kwargs)
    synchronise(spec)
    return outputs


def call_once(spec: EntrySpec, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """As `call`, without waiting for the device."""
    outputs = function(*args, **kwargs)
    if spec.train:
        loss(spec, outputs).backward()  # type: ignore[no-untyped-call]
    return outputs


def timed(spec: EntrySpec, work: Callable[[], Any], issue_s: float = 0.0) -> tuple[float, float]:
    """Returns the milliseconds that the device works for one call, and the seconds of the process to ask for it.

    Between two CUDA events, behind a wait of `issue_s` in the stream that lets the process run ahead: small kernels are asked for
    more slowly than they run, and the process would be measured, not the kernels. On a CPU: of the clock.
    """
    begin = time.perf_counter()
    if spec.device != "cuda":
        work()
        seconds = time.perf_counter() - begin
        return seconds * 1e3, seconds
    import torch

    from cachepipe.adapters.torch_settings import hold_stream

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    hold_stream(issue_s)
    start.record()
    work()
    end.record()
    asked = time.perf_counter() - begin
    end.synchronize()
    return float(start.elapsed_time(end)), asked


def synchronise(spec: EntrySpec) -> None:
    """Waits for the device, so that a wall time covers the work."""
    if spec.device == "cuda":
        import torch

        torch.cuda.synchronize()


def loss(spec: EntrySpec, outputs: Any) -> torch.Tensor:
    """Returns the scalar that a training entry propagates: the manifest's loss, or the sum of floating outputs."""
    if spec.loss is not None:
        value: torch.Tensor = resolve(spec.loss)(outputs)
        return value
    parts = [tensor.float().sum() for tensor in flatten(outputs) if tensor.is_floating_point()]
    if not parts:
        raise UsageError(f"no output of `{spec.factory}` is floating: a training entry needs `loss`")
    return sum(parts[1:], parts[0])


def gradients(model: Any) -> list[torch.Tensor]:
    """Returns the gradients of a module's parameters in order, and clears them."""
    import torch

    found = []
    if isinstance(model, torch.nn.Module):
        for parameter in model.parameters():
            if parameter.grad is not None:
                found.append(parameter.grad.detach().clone())
                parameter.grad = None
    return found


def flatten(outputs: Any) -> list[torch.Tensor]:
    """Returns the tensors of nested outputs (tensors, lists, tuples, mappings, dataclasses) in a fixed order.

    Numbers count as tensors: they are outputs too, and may be wrong.
    """
    import torch

    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, (bool, int, float)):
        return [torch.tensor(outputs)]
    if isinstance(outputs, Mapping):
        return [tensor for value in outputs.values() for tensor in flatten(value)]
    if isinstance(outputs, (list, tuple)):
        return [tensor for value in outputs for tensor in flatten(value)]
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return [tensor for field in dataclasses.fields(outputs) for tensor in flatten(getattr(outputs, field.name))]
    return []
