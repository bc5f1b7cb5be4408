"""Exports an entry: per shape bucket one shared object by AOTInductor, and the description of what was traced.

 1 call the model once and export it once, and note which code runs
 2 describe the module and that code; refuse what a native function cannot do
 3 compile the exported graph with all of the module's tensors as inputs: weights are never baked in
 4 write the functions and `engine.json`

Why weights are inputs: AOTInductor would fold constants of its own from them (packed GEMM weights), which an update of
the weights does not reach; and torch.compile, whose choices these are, has them as inputs too.

On a GPU the kernels lie in the shared object too: no second file to check, no path in it, and loading needs neither Triton nor a
compiler. Its CUDA graphs are recorded by the service (`runtime/replay.py`).

Source: torch/export/exported_program.py, torch/_inductor/__init__.py (`aot_compile`), torch/_inductor/config.py
(`aot_inductor`), torch/_inductor/cpp_builder.py (`convert_cubin_to_obj`, `get_cpp_torch_device_options`); read in torch 2.11.0,
checked against torch 2.13.0.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cachepipe.adapters.export_log import ExportLog
from cachepipe.adapters.torch_reads import Reads
from cachepipe.adapters.torch_settings import mode_options
from cachepipe.adapters.torch_structure import Structure, describe, resolve
from cachepipe.adapters.torch_text import is_library
from cachepipe.domain.engine import (
    FILE,
    FORMAT,
    BucketFunction,
    EngineFile,
    differences,
    in_words,
    sealed,
    unsteady_places,
)
from cachepipe.domain.entry import EntrySpec, bucket_label
from cachepipe.domain.record import sha256
from cachepipe.errors import UsageError
from cachepipe.runtime.calling import calling_context
from cachepipe.runtime.engine import Different, ambient_facts, form_of, parameter_names
from cachepipe.runtime.inputs import example_inputs

_OPTIONS: Mapping[str, Any] = types.MappingProxyType(
    {
        "aot_inductor.package": True,  # gives the list of files
        "aot_inductor.precompile_headers": False,  # they lie outside of the cache folder
        "aot_inductor.enable_line_tables": False,  # three quarters of the size
        "triton.cudagraphs": False,  # not for native functions
    }
)
_LINKED = "aot_inductor.custom_op_libs"
_LIBRARIES = ("libstdc++.so.6",)
"""Linked by their file names. Where a compiler has `libstdc++.a` alone, its `-lstdc++` puts a second C++ runtime into the shared object,
whose locales are not those of the one that torch loaded: `std::regex`, with which the function reads its device's name, throws
`std::bad_cast` or crashes the process.
"""
_CUDA_OPTIONS: Mapping[str, Any] = types.MappingProxyType({"aot_inductor.embed_kernel_binary": True})
_NOTHING: Mapping[str, str] = types.MappingProxyType({})
_CUDA_TOOLS = ("ld", "objcopy")
"""With which torch embeds kernels."""


def export_entry(spec: EntrySpec, model: Any, folder: Path, elsewhere: Mapping[str, str] = _NOTHING) -> None:
    """Writes the native functions of all shape buckets and `engine.json` into an empty folder.

    Args:
        spec: the entry.
        model: prepared.
        folder: is made.
        elsewhere: the module's description by another process; what differs there is not compared in services.

    Raises:
        UsageError: what this model does cannot be done by a native function; the reason is named.
        Exception: torch.export's or Inductor's own.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"`{spec.factory}` returned {type(model).__name__}: `engine: aot` needs an nn.Module")
    _prepare_linking(spec.device)
    folder.mkdir(parents=True)
    with ExportLog() as log:
        _export_into(spec, model, folder, log, elsewhere)


def _export_into(
    spec: EntrySpec, model: torch.nn.Module, folder: Path, log: ExportLog, elsewhere: Mapping[str, str]
) -> None:
    with calling_context(spec):
        ambient = ambient_facts(spec.device)
    reads = Reads(model, unsteady_places(describe(model, ()).texts, elsewhere))  # before a call, as `elsewhere`
    with reads:  # what the first call keeps may lie where no description sees it
        _warm_up(spec, model)
    log.say("called once")
    exported = []
    # 1
    with CalledCode() as called, reads:
        for shape_bucket in spec.shape_buckets:
            args, kwargs = example_inputs(spec, shape_bucket)
            exported.append(_export(spec, model, args, kwargs))
    unsteady = reads.unread()
    # 2
    structure = _described(spec, model, called)
    log.say(f"traced {len(exported)} shape buckets and described the model")
    # 3
    functions = []
    for number, (shape_bucket, one) in enumerate(zip(spec.shape_buckets, exported, strict=True)):
        functions.append(_compiled(spec, bucket_label(shape_bucket), number, one, structure, folder))
        log.say(f"compiled {bucket_label(shape_bucket)}")
    # 4
    names = tuple(sorted(called.names()))
    texts = {place: text for place, text in structure.texts.items() if place not in unsteady}
    made = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): sha256(path.read_bytes()) for path in made}
    parameters = parameter_names(model)
    facts = EngineFile(
        FORMAT, torch.__version__, parameters, names, texts, ambient, tuple(functions), files, unsteady=unsteady
    )
    (folder / FILE).write_bytes(sealed(facts))


@dataclasses.dataclass(frozen=True)
class _Exported:
    """One shape bucket's program with the arguments of its call."""

    program: Any
    signature: list[list[Any]]
    tensors: list[torch.Tensor]
    output: Any
    """How eager's outputs nest."""


def native_options(spec: EntrySpec) -> dict[str, Any]:
    """Returns Inductor's options for a native function: the entry's own, by which torch.compile chooses and tunes, and ours on top;
    what this torch does not know is left out.
    """
    chosen = mode_options(spec.mode, spec.options)
    own = {**_OPTIONS, **(_CUDA_OPTIONS if spec.device == "cuda" else {})}
    own[_LINKED] = [*(chosen.get(_LINKED) or []), *(f":{name}" for name in _LIBRARIES)]
    known = torch._inductor.list_options()
    return {**chosen, **{name: own[name] for name in own if name in known}}


def _prepare_linking(device: str) -> None:
    """Lets the linker find the very libraries that this process has loaded: the C++ runtime, and `libcuda.so`, a name that a toolkit's
    stub has, if there is one where torch looks, and no driver.

    Raises:
        UsageError: a tool is missing.
    """
    names = list(_LIBRARIES)
    if device == "cuda":
        missing = [tool for tool in _CUDA_TOOLS if shutil.which(tool) is None]
        if missing:
            raise UsageError(f"`engine: aot` for a GPU needs binutils on PATH: no {' and no '.join(missing)}")
        torch.cuda.init()  # type: ignore[no-untyped-call]  # loads the driver
        names.append("libcuda.so")
    folder = Path(tempfile.mkdtemp(prefix="libraries-"))  # below the worker's own TMPDIR
    lines = Path("/proc/self/maps").read_text().splitlines()
    for name in names:
        if path := next((line.split(maxsplit=5)[5] for line in lines if f"/{name}" in line), None):
            (folder / name).symlink_to(path)
    others = [os.environ["LIBRARY_PATH"]] if os.environ.get("LIBRARY_PATH") else []
    os.environ["LIBRARY_PATH"] = os.pathsep.join([*others, str(folder)])


def _warm_up(spec: EntrySpec, model: torch.nn.Module) -> None:
    """Has everything imported that is imported late, so that no importing code is taken for the model's."""
    args, kwargs = example_inputs(spec, spec.shape_buckets[0])
    with calling_context(spec):
        model(*args, **kwargs)
    with torch.no_grad():
        torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),), strict=False)


def _export(spec: EntrySpec, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Exported:
    with calling_context(spec):
        output = pytree.tree_structure(model(*args, **kwargs))
    tensors: list[torch.Tensor] = []
    try:
        given = {**dict(zip(parameter_names(model), args, strict=False)), **kwargs}
        if len(given) != len(args) + len(kwargs):
            raise Different("`forward` does not name all of its positional arguments")
        signature = [[name, form_of(given[name], tensors)] for name in sorted(given)]
    except Different as different:
        raise UsageError(f"`engine: aot`: {different}") from different
    # torch.export refuses tensors of inference mode; no_grad traces the same operations
    exporting = dataclasses.replace(spec, context=dataclasses.replace(spec.context, grad="no_grad"))
    with calling_context(exporting):
        program = torch.export.export(model, args, dict(kwargs), strict=False)
    return _Exported(program, signature, tensors, output)


def _described(spec: EntrySpec, model: torch.nn.Module, called: CalledCode) -> Structure:
    structure = describe(model, called.names())
    called.add_files(structure)
    structure = describe(model, called.names())
    hooks = [place for place in structure.texts if "_hooks[" in place]
    if hooks:
        raise UsageError(
            f"`engine: aot`: a hook is registered, whose effects a native function does not have: {hooks[0]}"
        )
    _refuse_changes(spec, model, called, structure)
    return structure


def _refuse_changes(spec: EntrySpec, model: torch.nn.Module, called: CalledCode, structure: Structure) -> None:
    """A native function gives outputs and does nothing else: what a call of the model changes is compared."""
    args, kwargs = example_inputs(spec, spec.shape_buckets[0])
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    tensors = {**structure.tensors, **{f"input {number}": tensor for number, tensor in enumerate(inputs)}}
    versions = {place: tensor._version for place, tensor in tensors.items()}
    with calling_context(spec):
        model(*args, **kwargs)
    written = [place for place, tensor in tensors.items() if tensor._version != versions[place]]
    if written:
        raise UsageError(f"`engine: aot`: a call writes into {', '.join(written)}, which a native function does not")
    changed = differences(structure.texts, describe(model, called.names()).texts)
    if changed:
        text = in_words(changed)
        raise UsageError(f"`engine: aot`: a call changes the module, which a native function does not: {text}")


def _compiled(
    spec: EntrySpec, label: str, number: int, exported: _Exported, structure: Structure, folder: Path
) -> BucketFunction:
    program, where = exported.program, f"`engine: aot`: shape bucket {label}"
    _refuse_random(program, where)
    places, arguments = _bind_inputs(program, exported.tensors, structure, where)
    leaves = _leaves(program.graph_module, where)
    output = program.call_spec.out_spec
    if output != exported.output:
        raise UsageError(f"{where}: the exported outputs nest otherwise than eager's: {output}, {exported.output}")
    is_single = output == pytree.tree_structure(torch.empty(0))
    with torch.no_grad():
        files: Any = torch._inductor.aot_compile(program.graph_module, tuple(arguments), options=native_options(spec))
    file = f"bucket-{number}.so"
    made = [Path(path) for path in files if isinstance(path, str)]
    (shared,) = [path for path in made if path.suffix == ".so"]
    shutil.copyfile(shared, folder / file)
    operators = shared.with_suffix(".json")
    if operators.is_file():  # found beside the shared object, by its name
        shutil.copyfile(operators, (folder / file).with_suffix(".json"))
    text = "" if is_single else pytree.treespec_dumps(output)
    return BucketFunction(label, file, exported.signature, tuple(places), text, leaves)


def _refuse_random(program: Any, where: str) -> None:
    for node in program.graph_module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _is_quiet(node):
            raise UsageError(f"{where}: the model draws random numbers: {node.target}")


def _is_quiet(node: Any) -> bool:
    """Tells whether an operator that can drop out does not: `dropout(x, p, train=False)`, attention with `dropout_p=0.0`."""
    names = [argument.name for argument in node.target._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    given = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    switches = [given[name] for name in ("train", "training", "dropout_p") if name in given]
    return bool(switches) and all(switch in (False, 0.0) for switch in switches)


def _bind_inputs(
    program: Any, tensors: Sequence[torch.Tensor], structure: Structure, where: str
) -> tuple[list[str], list[torch.Tensor]]:
    """Makes the exported graph a function of (the module's tensors, the call's tensors); constants of the code stay in it.

    Returns:
        Places of the module's tensors, and all tensors in the order of the graph's inputs.
    """
    graph_module = program.graph_module
    specs = program.graph_signature.input_specs
    nodes = {node.name: node for node in graph_module.graph.nodes if node.op == "placeholder"}
    waiting, places, arguments = list(tensors), [], []
    known = {id(tensor): place for place, tensor in structure.tensors.items()}
    state = {**dict(program.state_dict), **program.constants}
    for one in specs:
        node = nodes[one.arg.name]
        if one.kind.name == "USER_INPUT":
            if type(one.arg).__name__ != "TensorArgument":
                _drop(node, where)
                continue
            arguments.append(waiting.pop(0))
            continue
        value = state[one.target]
        place = f"self.{one.target}"
        if structure.tensors.get(place) is not value:
            place = known.get(id(value), "")
        if place:
            places.append(place)
            arguments.append(value)
        elif isinstance(value, torch.Tensor) and one.kind.name == "CONSTANT_TENSOR":
            _bake(graph_module, node, value)
        else:
            raise UsageError(f"{where}: cannot find `{one.target}` ({one.kind.name}) in the module")
    if waiting or places != places[: len(arguments) - len(tensors)]:
        raise UsageError(f"{where}: the exported inputs are not those of the call")
    graph_module.recompile()
    return places, arguments


def _drop(node: Any, where: str) -> None:
    if node.users:
        raise UsageError(f"{where}: argument `{node.name}` is no tensor, and not constant in the trace")
    node.graph.erase_node(node)


def _bake(graph_module: Any, node: Any, value: torch.Tensor) -> None:
    """A tensor that the code itself makes, such as `torch.tensor(0.5)`: part of the trace, as for torch.compile."""
    name = f"_constant_{node.name}"
    graph_module.register_buffer(name, value)
    with node.graph.inserting_before(node):
        made = node.graph.get_attr(name)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _leaves(graph_module: Any, where: str) -> list[Any]:
    """Leaves only tensors in the graph's output; returns per leaf the number of its tensor, or its constant."""
    (node,) = [one for one in graph_module.graph.nodes if one.op == "output"]
    kept: list[Any] = []
    leaves: list[Any] = []
    for leaf in node.args[0]:
        if not isinstance(leaf, torch.fx.Node):
            leaves.append(["const", leaf])
        elif leaf.op in ("placeholder", "get_attr"):
            raise UsageError(f"{where}: an output is one of the inputs or weights itself: `{leaf.name}`")
        elif leaf in kept:
            leaves.append(kept.index(leaf))
        else:
            leaves.append(len(kept))
            kept.append(leaf)
    if not kept:
        raise UsageError(f"{where}: no output is a tensor")
    node.args = (tuple(kept),)
    graph_module.recompile()
    return leaves


class CalledCode:
    """Collects the code that runs while this is entered, torch's and Python's own left out."""

    def __init__(self) -> None:
        self._codes: dict[types.CodeType, str] = {}
        """Code → name of its module."""
        self._seen: set[types.CodeType] = set()
        self._files: set[str] = set()
        self._before: Any = None

    def __enter__(self) -> CalledCode:
        self._before = sys.getprofile()
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def _on_event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in self._seen:
            self._seen.add(code)
            if code.co_name == "<module>":  # an import
                return
            module = str(frame.f_globals.get("__name__", ""))
            if module and not is_library(module):  # without a name: what torch generates and runs
                self._codes[code] = module

    def names(self) -> tuple[str, ...]:
        """Returns `module:name` for each outermost function, sorted, and `module` where only its file can be compared."""
        found = {name for code, module in self._codes.items() if (name := _code_name(code, module))}
        return tuple(sorted(found | self._files))

    def add_files(self, structure: Structure) -> None:
        """Adds the files of code that no digest of a structure covers.

        Raises:
            UsageError: such code has no file.
        """
        for code, module in self._codes.items():
            if code not in structure.codes:
                if not Path(getattr(sys.modules.get(module), "__file__", None) or "-").is_file():
                    raise UsageError(f"`engine: aot`: code that a service cannot compare: `{code.co_name}` of {module}")
                self._files.add(module)


def _code_name(code: types.CodeType, module: str) -> str:
    path = getattr(code, "co_qualname", "").partition(".<locals>")[0]  # Python 3.10 does not tell
    return f"{module}:{path}" if path and resolve(sys.modules.get(module), path) is not None else ""
