"""Describes a module and the code of its forward as a trace sees them: place → text.

    self.blocks.0.attention        quickstart_model.Attention, eval
    self.blocks.0.attention.heads  int 4
    self.norm.weight               parameter float32 (128,) strides (1,) cpu
    class quickstart_model.Block   8f1c…          digest of its code and plain attributes
    global quickstart_model.SCALE  float 2.0      of the code that the trace went through

In two processes with equal descriptions `forward` does the same operations. What cannot be described by value (locks,
sockets, objects in C) stands there by its type alone.

Source: torch/nn/modules/module.py, checked against torch 2.13.0.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cachepipe.adapters.torch_text import const_text, digest_of, is_library, name_of, plain_text, shown
from cachepipe.adapters.torch_watch import Watch, keys_of, plain_keys
from cachepipe.domain.engine import Description
from cachepipe.domain.record import escaped, record_bytes

MAX_DEPTH = 6
"""Objects within objects; what lies deeper stands there by its type."""
_GLOBAL_DEPTH = 3
"""Of what code finds among its globals."""
_TORCHS = ("_compiled_call_impl", "_is_torch_compile", "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id")
"""Marks of torch.compile on a module that it has compiled, as every fallback does."""
_OWN = frozenset({*vars(nn.Module()), *_TORCHS})
"""Fields of every nn.Module; they are described by what they hold."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PASSING = ("__dict__", "__weakref__", "__doc__", "__annotations__", "__annotate__", "__slotnames__", "__firstlineno__")
"""Members of classes that change nothing, or come and go while a program runs."""
_CALLABLES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class Structure:
    """A description, the tensors in it by their place, and a watch over everything that was described."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.codes: set[types.CodeType] = set()
        """Code objects that a digest covers."""
        self.watch = Watch()


def describe(module: nn.Module, code: Iterable[str]) -> Structure:
    """Returns the structure of a module.

    Args:
        module: as it is called.
        code: `module:name` of the functions that its trace goes through, or `module` for a whole file.
    """
    describer = _Describer()
    describer.module("self", module)
    for kind in ("forward_pre_hooks", "forward_hooks"):
        describer.hooks(f"global_{kind}", getattr(nn.modules.module, f"_global_{kind}"))
    for name in code:
        describer.code(name)
    describer.found.watch.pin()
    return describer.found


def write_description(module: nn.Module, path: Path) -> None:
    """Writes the description of a module without code: of its values some may differ from process to process."""
    texts = describe(module, ()).texts if isinstance(module, nn.Module) else {}
    path.write_bytes(record_bytes(Description(escaped(texts))))


class _Describer:
    def __init__(self) -> None:
        self.found = Structure()
        self._texts = self.found.texts
        self._watch = self.found.watch
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []
        self._digests: dict[int, str] = {}

    def _first(self, place: str, value: Any, what: str) -> bool:
        """Tells whether an object is met for the first time; else its place says where it was."""
        first = self._seen.setdefault(id(value), place)
        if first != place:
            self._texts[place] = f"the {what} at {first}"
            return False
        self._kept.append(value)  # so that its id stays its own
        return True

    def module(self, place: str, module: nn.Module) -> None:
        if not self._first(place, module, "module"):
            return
        self._texts[place] = f"{name_of(type(module))}, {'training' if module.training else 'eval'}"
        self._class(type(module))
        self._texts[f"forward of {name_of(type(module))}"] = self._callable(type(module).forward)
        self._watch.add_module(module)
        for fields in (vars(module), module._parameters, module._buffers, module._modules):
            self._watch.add_dict(fields)
        for name, parameter in module._parameters.items():
            self._tensor(f"{place}.{name}", parameter, "parameter")
        for name, buffer in module._buffers.items():
            self._tensor(f"{place}.{name}", buffer, "buffer")
        for name in _HOOKS:
            self.hooks(f"{place}.{name}", getattr(module, name))
        for name, value in vars(module).items():
            if name not in _OWN:
                self.value(f"{place}.{name}", value)
        for name, child in module._modules.items():
            self.value(f"{place}.{name}", child)

    def hooks(self, place: str, hooks: dict[int, Any]) -> None:
        self._watch.add_dict(hooks)
        for number, hook in enumerate(hooks.values()):
            self.value(f"{place}[{number}]", hook)

    def _tensor(self, place: str, tensor: torch.Tensor | None, kind: str) -> None:
        if tensor is None:
            self._texts[place] = f"{kind} None"
            return
        self.found.tensors[place] = tensor
        if not self._first(place, tensor, kind):
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        words = [kind, dtype, str(tuple(tensor.shape)), "strides", str(_strides(tensor)), str(tensor.device)]
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            words.append(name_of(type(tensor)))
        if tensor.requires_grad:
            words.append("requires_grad")
        if keys_of(tensor) not in plain_keys(tensor.device.type):
            words.append("no plain dense tensor")
        self._texts[place] = " ".join(words)

    def value(self, place: str, value: Any, depth: int = 0) -> None:
        plain = plain_text(value)
        if plain is not None:
            self._texts[place] = f"{type(value).__name__} {shown(plain)}"
            self._watch_plain(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(place, value, "tensor")
        elif isinstance(value, nn.Module):
            self.module(place, value)
        elif isinstance(value, _CALLABLES):
            self._texts[place] = self._callable(value)
        elif isinstance(value, type):
            self._texts[place] = f"class {name_of(value)}"
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._texts[place] = f"module {value.__name__}"
        elif depth < MAX_DEPTH and isinstance(value, (list, tuple, dict)):
            self._container(place, value, depth)
        elif depth < MAX_DEPTH and isinstance(getattr(value, "__dict__", None), dict) and not _is_foreign(value):
            self._object(place, value, depth)
        else:
            self._texts[place] = f"object {name_of(type(value))}"

    def _container(self, place: str, value: Any, depth: int) -> None:
        if not self._first(place, value, type(value).__name__):
            return
        self._texts[place] = f"{type(value).__name__} of {len(value)}"
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        self._watch_one(value)
        for key, item in items:
            self.value(f"{place}[{shown(plain_text(key) or name_of(type(key)))}]", item, depth + 1)

    def _object(self, place: str, value: Any, depth: int) -> None:
        if not self._first(place, value, "object"):
            return
        self._texts[place] = f"object {name_of(type(value))}"
        self._class(type(value))
        self._watch.add_dict(vars(value))
        for name, item in vars(value).items():
            self.value(f"{place}.{name}", item, depth + 1)

    def _watch_one(self, value: Any) -> None:
        if isinstance(value, dict):
            self._watch.add_dict(value)
        elif isinstance(value, (list, set)):
            self._watch.add_list(value)

    def _watch_plain(self, value: Any) -> None:
        if isinstance(value, (list, tuple, dict, set)):
            self._watch_one(value)
            for item in value.values() if isinstance(value, dict) else value:
                self._watch_plain(item)

    # code

    def _class(self, cls: type) -> None:
        for owner in cls.__mro__:
            place = f"class {name_of(owner)}"
            if is_library(owner.__module__) or not self._first(place, owner, "class"):
                continue
            self._watch.add_class(owner)
            rows = [f"{name}={self._member(value)}" for name, value in sorted(vars(owner).items()) if _counts(name)]
            self._texts[place] = digest_of("\n".join(rows))

    def _member(self, value: Any) -> str:
        if isinstance(value, (classmethod, staticmethod)):
            return f"{type(value).__name__} {self._callable(value.__func__)}"
        if isinstance(value, property):
            return " ".join(self._callable(part) for part in (value.fget, value.fset) if part is not None)
        if isinstance(value, functools.cached_property):
            return self._callable(value.func)
        plain = plain_text(value)
        if plain is None:
            return self._callable(value)
        self._watch_plain(value)
        return f"{type(value).__name__} {plain}"

    def _callable(self, value: Any) -> str:
        if isinstance(value, types.FunctionType):
            return f"function {value.__module__}.{value.__qualname__} {self._function(value)}"
        if isinstance(value, types.MethodType):
            return f"method of {name_of(type(value.__self__))}: {self._callable(value.__func__)}"
        if isinstance(value, functools.partial):
            bound = [self._cell(item) for item in (*value.args, *value.keywords.values())]
            return f"partial {self._callable(value.func)} {bound}"
        if isinstance(value, type):
            return f"class {name_of(value)}"
        return f"object {getattr(value, '__qualname__', '')} {name_of(type(value))}"

    def _function(self, function: types.FunctionType) -> str:
        """Returns a digest of a function's code, defaults and closure."""
        known = self._digests.get(id(function))
        if known is None:
            self._digests[id(function)] = "itself"
            self._kept.append(function)
            cells = [self._cell(cell) for cell in _closure(function)]
            defaults = [self._cell(item) for item in function.__defaults__ or ()]
            named = [f"{name}={self._cell(item)}" for name, item in sorted((function.__kwdefaults__ or {}).items())]
            known = digest_of("\n".join([self._code(function.__code__), *cells, *defaults, *named]))
            self._digests[id(function)] = known
        return known

    def _cell(self, value: Any) -> str:
        plain = plain_text(value)
        if plain is None:
            return self._callable(value)
        self._watch_plain(value)
        return plain

    def _code(self, code: types.CodeType) -> str:
        self.found.codes.add(code)
        consts = [self._code(item) if isinstance(item, types.CodeType) else const_text(item) for item in code.co_consts]
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        return digest_of(repr((code.co_code, names, counts, consts)))

    def code(self, name: str) -> None:
        """Describes one function that a trace goes through and what it finds among its globals, or a whole file."""
        module_name, _, path = name.partition(":")
        module = _imported(module_name)
        if not path:
            self._texts[f"file {name}"] = _file_digest(module)
            return
        found = resolve(module, path)
        if not isinstance(found, types.FunctionType):
            self._texts[f"code {name}"] = "missing" if found is None else self._callable(found)
            if isinstance(found, type):
                self._class(found)
            return
        self._texts[f"code {name}"] = self._callable(found)
        for function in _reachable(found):
            self._globals(function)

    def _globals(self, function: types.FunctionType) -> None:
        scope = function.__globals__
        owner = str(scope.get("__name__", ""))
        if is_library(owner):
            return
        names = sorted(_names(function.__code__))
        self._watch.add_scope(scope, names)
        for name in names:
            if name not in scope:
                continue
            value = scope[name]
            if isinstance(value, types.ModuleType):
                self._module_members(value, names)
            elif not is_library(getattr(value, "__module__", None) or ""):
                self.value(f"global {owner}.{name}", value, MAX_DEPTH - _GLOBAL_DEPTH)

    def _module_members(self, module: types.ModuleType, names: Iterable[str]) -> None:
        if is_library(module.__name__):
            return
        self._watch.add_scope(vars(module), names)
        for name in names:
            if name in vars(module) and plain_text(vars(module)[name]) is not None:
                self.value(f"global {module.__name__}.{name}", vars(module)[name])


def _imported(name: str) -> types.ModuleType | None:
    """Returns a module that the trace went through; the first call would import it too."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def resolve(module: types.ModuleType | None, path: str) -> Any:
    """Returns what `path` names in a module, with what a property or a static method wraps; None: nothing does."""
    found: Any = module
    for name in path.split("."):
        try:
            found = vars(found)[name]
        except (KeyError, TypeError):
            return None
        if isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
    return found


def _reachable(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Gives a function and those that its closure holds, as decorators leave them."""
    waiting, seen = [function], {id(function)}
    while waiting:
        one = waiting.pop()
        yield one
        for cell in _closure(one):
            if isinstance(cell, types.FunctionType) and id(cell) not in seen:
                seen.add(id(cell))
                waiting.append(cell)


def _closure(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            continue  # a name that was never bound
    return found


def _names(code: types.CodeType) -> set[str]:
    nested = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return {*code.co_names}.union(*map(_names, nested))


def _counts(name: str) -> bool:
    return name not in _PASSING and not name.startswith("_abc_")


def _is_foreign(value: Any) -> bool:
    return is_library(type(value).__module__)


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | str:
    return tensor.stride() if tensor.layout == torch.strided else str(tensor.layout)


def _file_digest(module: types.ModuleType | None) -> str:
    path = getattr(module, "__file__", None)
    try:
        return hashlib.sha256(Path(path or "").read_bytes()).hexdigest()[:16]
    except OSError:
        return "missing"
