"""The engine `aot` in the service: native functions that are bound to a module, and which calls they may answer.

A call of a built shape bucket runs its native function if the module, its code and torch's state are what the builder
described; whatever differs is said once, in words, and that call is traced by torch.compile as without this engine.

 1 describe the module and compare with the builder's description     (at `compile`)
 2 find the function by the form of the arguments                      (every call)
 3 look whether anything has changed since; if so, compare again
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from cachepipe.adapters.torch_aoti import Run, load_native, unflattener
from cachepipe.adapters.torch_settings import ambient_settings
from cachepipe.adapters.torch_structure import Structure, describe
from cachepipe.adapters.torch_watch import Ambient, has_modes, keys_of, plain_keys
from cachepipe.domain.engine import (
    FILE,
    FILE_BYTES,
    FORMAT,
    BucketFunction,
    EngineFile,
    check_own,
    differences,
    in_words,
)
from cachepipe.domain.limits import MIB
from cachepipe.domain.record import Json, read_record
from cachepipe.errors import IntegrityError
from cachepipe.runtime.replay import CudaGraphs, Graphs, Replayed

MAX_SAID = 16
"""Reasons for a trace that are reported; a service whose every request differs must not fill its log."""
_CONSTANTS: tuple[Any, ...] = (type(None), bool, int, float, str)


class Listener(Protocol):
    """Hears of every shape bucket's first native call, and of each reason for a trace."""

    def on_engine(self, label: str, is_hit: bool, reason: str) -> None: ...

    def on_capture(self, label: str, reason: str) -> None:
        """A CUDA graph was recorded, or for a reason none will be."""


class Different(Exception):
    """Why a call is not answered by a native function."""


class _Function:
    """One loaded shape bucket."""

    def __init__(
        self, facts: BucketFunction, folder: Path, device: torch.device, graphs: Graphs | None, listener: Listener
    ) -> None:
        path = str(folder / facts.file)
        self.label = facts.shape_bucket
        self.key = tuple((name, key_of_form(form)) for name, form in facts.signature)
        self.places = facts.weights
        self.weights: list[torch.Tensor] = []
        self.run: Callable[[list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]]
        run, lock = load_native(path, device), threading.Lock() if device.type == "cuda" else nullcontext()
        if graphs is not None:
            self.run = Replayed(run, device, graphs, functools.partial(listener.on_capture, facts.shape_bucket))
        else:
            self.run = functools.partial(_locked, run, lock)
        self.unflatten = unflattener(facts.output, facts.leaves)
        self.is_told = False


def _locked(
    run: Run, lock: AbstractContextManager[Any], weights: list[torch.Tensor], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    with lock:
        return run([*weights, *inputs])


class Engine:
    """The native functions of one entry, bound to one module; safe to call from any thread."""

    def __init__(self, module: nn.Module, folder: Path, device: str, listener: Listener, replays: bool) -> None:
        """Raises:
        Different: the functions cannot be used in this process.
        """
        self._module, self._device, self._listener = module, device, listener
        self._lock = threading.Lock()
        self._file = read_engine_file(folder)
        self._names = self._file.parameters
        self._unsteady = frozenset(self._file.unsteady)
        self._plain = plain_keys(device)
        self._said: set[str] = set()
        self._pins: dict[bool, tuple[Ambient, list[torch.Tensor]]] = {}
        self._structure = self._describe()
        self._why_different = self._differences()
        if self._why_different:
            raise Different(self._why_different)
        try:
            _check_files(self._file, folder)
            self._place = _place(device, self._structure)
            graphs = CudaGraphs(self._place) if replays else None
            loaded = [_Function(facts, folder, self._place, graphs, listener) for facts in self._file.functions]
        except Exception as error:
            raise Different(f"{type(error).__name__}: {error}") from error
        self._functions = {function.key: function for function in loaded}
        self._bind()

    def find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[_Function, list[torch.Tensor], list[torch.Tensor]]:
        """Returns the function for a call, the weights and the inputs to pass.

        Raises:
            Different: torch.compile has to answer.
        """
        # 2
        tensors: list[torch.Tensor] = []
        key = self._key(args, kwargs, tensors)
        function = self._functions.get(key)
        if function is None:
            raise Different("no shape bucket of the artifact has arguments of this form")
        for tensor in tensors:
            if keys_of(tensor) not in self._plain:
                raise Different("an argument is no plain dense tensor")
        if self._device == "cuda":
            self._refuse_other_cuda()
        # 3, as one step: a thread that replaces weights or makes them differ is seen whole or not at all
        with self._lock:
            pin = self._pins.get(torch.is_inference_mode_enabled())
            if pin is None or self._why_different or not (self._structure.watch.is_same() and pin[0].is_same(pin[1])):
                self._look_again()
            weights = function.weights
        if not function.is_told:
            function.is_told = True
            self._listener.on_engine(function.label, True, "")
        return function, weights, tensors

    def say(self, reason: str, label: str = "-") -> None:
        """Reports why a call is traced, each reason once."""
        if reason not in self._said and len(self._said) < MAX_SAID:
            self._said.add(reason)
            self._listener.on_engine(label, False, reason)

    def _refuse_other_cuda(self) -> None:
        if torch.cuda.current_device() != self._place.index:
            raise Different(f"the current device is not {self._place}")
        if torch.cuda.is_current_stream_capturing():  # the function asks for events, which would end the recording
            raise Different("the current stream is recorded as a CUDA graph")

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]) -> Any:
        if len(args) > len(self._names):
            raise Different("more positional arguments than `forward` names")
        given = dict(zip(self._names, args, strict=False))
        if given.keys() & kwargs.keys():
            raise Different("an argument is given twice")
        given.update(kwargs)
        # one order for the same call, however it is written
        return tuple((name, _key(given[name], tensors)) for name in sorted(given))

    def _look_again(self) -> None:
        """Compares state and module with what was built, after something has changed or at a mode's first call; under the lock.

        A mode's first call describes the module anew: tensors may have changed in place since (`half()`, `.data`), which only the
        pins of a mode that was called see.
        """
        if has_modes():
            raise Different("a torch-function or dispatch mode is on (a default device counts as one)")
        here = ambient_facts(self._device)
        found = differences(self._file.ambient, here)
        if found:
            raise Different(in_words(found))
        is_inference = torch.is_inference_mode_enabled()
        pin = self._pins.get(is_inference)
        is_watched_same = self._structure.watch.is_same()
        if not is_watched_same or pin is None or not pin[0].is_same(pin[1]):
            self._structure = self._describe()
            self._why_different = self._differences()
            if not is_watched_same or pin is not None:
                self._pins.clear()
            if not self._why_different:
                self._bind()
        if self._why_different:
            self._pins.setdefault(is_inference, self._pin())
            raise Different(self._why_different)
        if is_inference not in self._pins:
            self._pins[is_inference] = self._pin()

    def _describe(self) -> Structure:
        return describe(self._module, self._file.code)

    def _differences(self) -> str:
        here = {place: text for place, text in self._structure.texts.items() if place not in self._unsteady}
        return in_words(differences(self._file.structure, here))

    def _pin(self) -> tuple[Ambient, list[torch.Tensor]]:
        tensors = list({id(tensor): tensor for tensor in self._structure.tensors.values()}.values())
        return Ambient(tensors), tensors

    def _bind(self) -> None:
        """Takes the module's tensors as they are now: replaced weights are no difference."""
        for function in self._functions.values():
            function.weights = [self._structure.tensors[place] for place in function.places]


def _place(device: str, structure: Structure) -> torch.device:
    """Returns where a module lies; one without tensors on the current GPU."""
    found = (tensor.device for tensor in structure.tensors.values() if tensor.device.type == device)
    return next(found, None) or torch.device(f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device)


def ambient_facts(device: str) -> dict[str, str]:
    """Returns the process-wide state that changes what an operation does; environment variables only steer compiles.

    Inference mode is `no_grad` here, as for torch's guards: the same kernels run. So is a precision of `none` `ieee`.
    """
    facts = {name: text for name, text in ambient_settings(device).items() if not name.startswith("variable ")}
    if facts["fp32 precision"] == "none":
        facts["fp32 precision"] = "ieee"
    if device == "cuda":
        del facts["threads"]  # of the CPU: a GPU's sums do not depend on them
    return {**facts, "grad mode": "grad" if torch.is_grad_enabled() else "no_grad"}


def read_engine_file(folder: Path) -> EngineFile:
    """Raises:
    Different: there is none, or one of another format or torch.
    """
    try:
        with (folder / FILE).open("rb") as file:
            data = file.read(FILE_BYTES + 1)
        found = read_record(EngineFile, data, FILE, FILE_BYTES)
    except (OSError, IntegrityError) as error:
        raise Different(f"the artifact's native functions cannot be read: {error}") from error
    if found.format != FORMAT:
        raise Different(f"native functions of format {found.format}, not {FORMAT}")
    if found.torch_version != torch.__version__:
        raise Different(f"native functions of torch {found.torch_version}, here {torch.__version__}")
    try:
        check_own(found, data)
    except IntegrityError as error:
        raise Different(str(error)) from error
    return found


def _check_files(facts: EngineFile, folder: Path) -> None:
    """Compares what will be loaded with the builder's digests; a flipped byte in native code would end the process.

    Raises:
        IntegrityError: a file was changed, or one that is loaded has no digest although others have.
        OSError: one cannot be read.
    """
    for one in facts.functions:
        if facts.files and one.file not in facts.files:
            raise IntegrityError(one.file, "no digest in `engine.json`")
    for name, wanted in facts.files.items():
        whole = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while chunk := file.read(MIB):
                whole.update(chunk)
        if whole.hexdigest() != wanted:
            raise IntegrityError(name, "changed since it was built", wanted=wanted, found=whole.hexdigest())


def _key(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns the form of an argument as a key; the tensors in it are appended."""
    kind = type(value)
    if kind is torch.Tensor:
        tensors.append(value)
        return value.dtype, value.shape, value.stride(), value.device
    if kind in _CONSTANTS:
        return kind, value
    if kind is list or kind is tuple:
        return kind, tuple([_key(item, tensors) for item in value])
    if kind is dict:
        return kind, tuple([(name, _key(item, tensors)) for name, item in value.items()])
    raise Different(f"an argument is a {kind.__module__}.{kind.__qualname__}")


def form_of(value: Any, tensors: list[torch.Tensor]) -> Json:
    """Returns the form of an argument as JSON: what the builder writes; the tensors in it are appended.

    Raises:
        Different: it has no such form.
    """
    kind = type(value)
    if kind is torch.Tensor:
        tensors.append(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", dtype, list(value.shape), list(value.stride()), str(value.device)]
    if kind in _CONSTANTS:
        return ["const", kind.__name__, value]
    if kind in (list, tuple):
        return [kind.__name__, [form_of(item, tensors) for item in value]]
    if kind is dict and all(type(name) is str for name in value):
        return ["dict", [[name, form_of(item, tensors)] for name, item in value.items()]]
    raise Different(f"an argument is a {kind.__module__}.{kind.__qualname__}")


def key_of_form(form: Json) -> Any:
    """Returns the key of the arguments that have a form."""
    what, *rest = form
    if what == "tensor":
        dtype, shape, strides, device = rest
        return getattr(torch, dtype), torch.Size(shape), tuple(strides), torch.device(device)
    if what == "const":
        (kind,) = [one for one in _CONSTANTS if one.__name__ == rest[0]]
        return kind, kind(rest[1]) if kind is not type(None) else None
    if what == "dict":
        return dict, tuple((name, key_of_form(item)) for name, item in rest[0])
    return {"list": list, "tuple": tuple}[what], tuple(key_of_form(item) for item in rest[0])


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names by which positional arguments of `forward` are known."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, one in inspect.signature(module.forward).parameters.items() if one.kind in kinds)
