"""From differing key components to causes in words: one rule per kind of cause, the strongest first.

Each rule takes away the components that its cause accounts for, so that what follows from a cause is not told as another
one: another grad mode changes the graph's code as well. What no rule knows is told as it is, with both values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from cachepipe.domain.components import Cause, Differences, short, sizes, source_paths, tensor_facts

MAX_UNKNOWN = 12
"""Components without a rule that are named per miss: more mean that everything differs."""
_ENTRY_FIX = "call inside `entry.context()`, which sets what was built"
_COMPILE_FIX = "compile by `entry.compile(model)`, which uses the built settings"
_MODES = {
    ("False", "False", "False"): "default",
    ("True", "False", "False"): "reduce-overhead",
    ("True", "True", "True"): "max-autotune",
    ("False", "True", "True"): "max-autotune-no-cudagraphs",
}
_MODE_OPTIONS = ("triton.cudagraphs", "max_autotune", "coordinate_descent_tuning")
_VARIABLES = {
    "cpp.cxx": "CXX",
    "log_tlparse": "LOG_TLPARSE",
    "torchinductor_worker_logpath": "TORCHINDUCTOR_WORKER_LOGPATH",
    "worker_logpath": "TORCHINDUCTOR_WORKER_LOGPATH",
    "file_lock_timeout": "TORCHINDUCTOR_FILE_LOCK_TIMEOUT",
    "compile_worker_wait_timeout": "TORCHINDUCTOR_COMPILE_WORKER_WAIT_TIMEOUT",
}
"""Inductor options whose default is read from a variable under another name than `TORCHINDUCTOR_<OPTION>`."""

Causes = list[Cause]


def causes(differences: Differences) -> Causes:
    """Returns why two keys differ; at least one cause unless they are equal."""
    found = [cause for rule in RULES for cause in rule(differences)]
    rest = sorted(differences.names)
    for name in rest[:MAX_UNKNOWN]:
        before, after = differences.texts(name)
        found.append(Cause(f"{name}: built {short(before)}, called {short(after)}", "make both sides equal", (name,)))
    if len(rest) > MAX_UNKNOWN:
        found.append(Cause(f"and {len(rest) - MAX_UNKNOWN} more components", "build again", tuple(rest[MAX_UNKNOWN:])))
    return found


def _versions(here: Differences) -> Causes:
    names = here.take("torch_version", "system_info*", "inductor_code_hash*")
    if not names:
        return []
    before, after = here.texts(names[0])
    sentence = f"torch, Triton, CUDA or GPU: built {short(before)}, called {short(after)}"
    return [Cause(sentence, "restore the artifact of this build: no entry crosses versions or GPU models", names)]


def _debugging(here: Differences) -> Causes:
    pair = here.variables().get("TORCH_COMPILE_DEBUG")
    if pair is None:
        return []
    names = here.take(
        "inductor_config[*provenance*]", "provenance_tracking*", "autograd_config", "inductor_config[debug]"
    )
    sentence = f"TORCH_COMPILE_DEBUG: built {pair[0] or 'unset'}, called {pair[1] or 'unset'}"
    return (
        [Cause(sentence, "unset it: `TORCH_LOGS` and `TORCH_TRACE` tell as much and keep the keys", names)]
        if names
        else []
    )


def _grad_mode(here: Differences) -> Causes:
    if not here.take("grad_enabled") and "fx_kwargs[is_inference]" not in here.names:
        return []
    names = (
        "grad_enabled",
        *here.take("fx_kwargs[is_inference]", "is_inference", "gm", "fx_kwargs[static_input_idxs]*"),
    )
    before, after = here.setting("grad mode") or (_grad_words(here, 0), _grad_words(here, 1))
    return [Cause(f"grad mode: built {before}, called {after}", _ENTRY_FIX, names)]


def _grad_words(here: Differences, side: int) -> str:
    is_enabled, is_inference = here.texts("grad_enabled")[side], here.texts("fx_kwargs[is_inference]")[side]
    return "grad" if is_enabled == "True" or is_inference == "False" else "no_grad"


def _autocast(here: Differences) -> Causes:
    names = here.take("autocast_state*")
    if not names:
        return _autocast_from_setting(here)
    before, after = (text.removeprefix("torch.") or "off" for text in here.texts(names[0]))
    before, after = here.setting("autocast") or (before, after)
    return [
        Cause(f"autocast: built {before}, called {after}", _ENTRY_FIX, (*names, *here.take("gm", "example_inputs*")))
    ]


def _autocast_from_setting(here: Differences) -> Causes:
    """The inner key has no autocast state: only its graph's code differs."""
    pair = here.setting("autocast")
    names = here.take("gm") if pair else ()
    return [Cause(f"autocast: built {pair[0]}, called {pair[1]}", _ENTRY_FIX, names)] if pair and names else []


def _dtypes(here: Differences) -> Causes:
    names = here.take("default_dtype")
    if not names:
        return []
    before, after = (text.removeprefix("torch.") for text in here.texts("default_dtype"))
    return [
        Cause(
            f"default dtype: built {before}, called {after}", "call `torch.set_default_dtype` as the builder did", names
        )
    ]


def _determinism(here: Differences) -> Causes:
    names = here.take("deterministic_algorithms*", "inductor_config[deterministic]", "*fill_uninitialized_memory*")
    if not names:
        return []
    pair = here.setting("deterministic algorithms") or here.texts(
        "deterministic_algorithms" if "deterministic_algorithms" in names else names[0]
    )
    return [Cause(f"deterministic algorithms: built {short(pair[0])}, called {short(pair[1])}", _ENTRY_FIX, names)]


def _matmul(here: Differences) -> Causes:
    names = here.take("cuda_matmul_settings")
    if not names:
        return []
    labels = {
        "matmul precision": "call `torch.set_float32_matmul_precision` as the builder did, or use `entry.context()`",
        "fp32 precision": "use `entry.context()`, or do not set `highest`, which torch starts with: `none` and `ieee` are two keys",
        "tf32 matmul": "set `torch.backends.cuda.matmul.allow_tf32` as the builder did",
        "fp16 reduction": "set `torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` as the builder did",
        "bf16 reduction": "set `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` as the builder did",
    }
    found: Causes = []
    for label, fix in labels.items():
        pair = here.setting(label)
        if pair and not (label in ("tf32 matmul", "fp32 precision") and found):  # one follows from the other
            found.append(Cause(f"{label}: built {pair[0]}, called {pair[1]}", fix, names))
    if found:
        return found
    before, after = here.texts("cuda_matmul_settings")
    sentence = f"matmul settings (fp32 precision, fp16 reduction, bf16 reduction): built {before}, called {after}"
    return [Cause(sentence, labels["matmul precision"], names)]


def _threads(here: Differences) -> Causes:
    names = here.take("cpp_runtime_thread_count", "inductor_config[cpp.threads]", "cpp_threads*")
    if not names:
        return []
    before, after = here.texts(names[0])
    fix = f"give the service {before} threads (`OMP_NUM_THREADS={before}`, CPU quota), or build for {after}"
    return [Cause(f"threads: {before} → {after}", fix, names)]


def _key_tag(here: Differences) -> Causes:
    names = here.take("cache_key_tag")
    before, after = here.texts("cache_key_tag")
    sentence = f"cache key tag: built {before or 'unset'}, called {after or 'unset'}"
    return [Cause(sentence, "set `TORCH_COMPILE_CACHE_KEY_TAG` alike on both sides", names)] if names else []


def _mode(here: Differences) -> Causes:
    components = tuple(f"inductor_config[{option}]" for option in _MODE_OPTIONS)
    if not set(components) & here.names:
        return []
    sides = zip(*(here.texts(component) for component in components), strict=True)
    before, after = (_MODES.get(side) for side in sides)
    if before is None or after is None:
        return []
    names = here.take(*components, "fx_kwargs[cudagraphs]")
    return [Cause(f"compile mode: built {before}, called {after}", _COMPILE_FIX, names)]


def _inductor_options(here: Differences) -> Causes:
    found = []
    variables = here.variables()
    for name in here.take("inductor_config[*]"):
        option = name.removeprefix("inductor_config[").removesuffix("]")
        before, after = here.texts(name)
        variable = _VARIABLES.get(option, f"TORCHINDUCTOR_{option.upper().replace('.', '_')}")
        sentence = f"inductor config {option}: built {short(before)}, called {short(after)}"
        if variable in variables:
            fix = f"set the variable `{variable}` alike on both sides, or on neither"
            sentence += f" (variable {variable})"
        else:
            fix = f"set `torch._inductor.config.{option}` alike on both sides, or list it in the manifest's `options`"
        found.append(Cause(sentence, fix, (name,)))
    return found


def _functorch(here: Differences) -> Causes:
    names = here.take("autograd_config", "precompile_enabled")
    if not names:
        return []
    options = here.configs.get("functorch", {})
    if not options:
        return [
            Cause("functorch config: differs, and no recorded option does", "compare `torch._functorch.config`", names)
        ]
    return [
        Cause(
            f"functorch config: {option}: built {before}, called {after}",
            f"set `torch._functorch.config.{option}` alike on both sides: the outer key holds the whole configuration",
            names,
        )
        for option, (before, after) in sorted(options.items())
    ]


def _another_graph(here: Differences) -> Causes:
    """A graph that shares no argument with the nearest built one is not one of the builder's that changed."""
    before, after = _arguments_of(here)
    if "aot_config" not in here.names or not before or not after or set(before) & set(after):
        return []
    if len(before) == len(after):
        return []  # renamed throughout, or called through another function
    sentence = f"a graph that was not built: its arguments ({_some(after)}) are those of no graph of the builder"
    fix = "a hook, wrapper, decorator or graph break of the service has torch compile code of its own: take it out, or build with it"
    return [Cause(sentence, fix, here.take("*"))]


def _arguments_of(here: Differences) -> tuple[list[str], list[str]]:
    """Returns the paths of the arguments, of both texts as many where one is cut."""
    texts = here.texts("aot_config")
    before, after = (source_paths(text) for text in texts)
    count = min(len(before), len(after)) if any("]" not in text for text in texts) else max(len(before), len(after))
    return before[:count], after[:count]


def _dynamic(here: Differences) -> Causes:
    kinds = []
    for components in (here.built, here.found):
        inputs = [short(_text(components, name)) for name in sorted(components) if name.startswith("example_inputs[")]
        shapes = [tensor_facts(text).get("shape", "") for text in inputs]
        kinds.append([shape for shape in shapes if shape and sizes(shape) is None])
    if bool(kinds[0]) == bool(kinds[1]) or not any(name.startswith("example_inputs") for name in here.names):
        return []
    names = here.take("aot_config", "gm", "example_inputs[*]", "symint*", "*hint*")
    words = [f"dynamic {shapes[0]}" if shapes else "static" for shapes in kinds]
    fix = f"{_COMPILE_FIX}; a dimension is dynamic only if `dynamic_dims` of the manifest says so"
    return [Cause(f"dynamic shapes: built {words[0]}, called {words[1]}", fix, names)]


def _text(components: Mapping[str, object], name: str) -> str:
    value = components.get(name)
    return str(value[1]) if isinstance(value, list) and len(value) > 1 else ""


_INPUT_FIXES = {
    "dtype": "give weights and inputs the dtype that was built: `entry.compile(model)` sets that of the weights",
    "requires_grad": "set `requires_grad_` as the builder did: `entry.compile(model)` does it",
    "device": "let each process see one GPU (`CUDA_VISIBLE_DEVICES`), so that its index is 0 as it was for the builder",
    "stride": "pass tensors with the memory layout that was built: `.contiguous()`, or the manifest's `memory_format`",
    "storage_offset": "pass a tensor with a storage of its own, not a view into a larger one: `.clone()`",
    "is_inference": "make input tensors outside of `inference_mode`, as warm-up does",
    "memory_format": "pass tensors in the memory format that was built",
}


def _inputs(here: Differences) -> Causes:
    """Differences of example inputs, one cause per field, with the arguments that have it."""
    paths = here.paths
    fields: dict[tuple[str, str, str], list[str]] = {}
    names = [name for name in sorted(here.names) if name.startswith("example_inputs[")]
    for name in names:
        before, after = (tensor_facts(text) for text in here.texts(name))
        if not before or not after:
            continue
        number = name[len("example_inputs[") : -1]
        place = paths[int(number)] if number.isdigit() and int(number) < len(paths) else f"input {number}"
        for field in _differing_fields(before, after):
            fields.setdefault((field, before.get(field, ""), after.get(field, "")), []).append(place)
        here.take(name)
    found: Causes = []
    for (field, was, now), places in fields.items():
        fix = _INPUT_FIXES.get(field, "")
        where = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
        if field == "shape":
            found.append(Cause(f"shape {now} of {where}: built {was}", "", tuple(names)))
        else:
            found.append(Cause(f"{field.replace('_', ' ')} of {where}: built {was}, called {now}", fix, tuple(names)))
    if found:
        here.take("gm")
    return found


def _differing_fields(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Returns the fields that differ, without those that follow from another: strides from the shape, formats from strides."""
    differing = [field for field in ("shape", *_INPUT_FIXES) if before.get(field) != after.get(field)]
    if "shape" in differing:
        return ["shape"]
    return [field for field in differing if field != "memory_format" or "stride" not in differing]


def _arguments(here: Differences) -> Causes:
    if not here.take("aot_config"):
        return []
    before, after = _arguments_of(here)
    names: tuple[str, ...] = ("aot_config",)
    if len(before) != len(after):
        names += here.take("gm", "example_inputs[*]")
        sentence = (
            f"arguments of the graph: built {len(before)} ({_some(before)}), called {len(after)} ({_some(after)})"
        )
        return [Cause(sentence, "call the model with the arguments that were built, and none besides", names)]
    pairs = {(one, other) for one, other in zip(before, after, strict=True) if one != other}
    roots = {(one.split(".")[0], other.split(".")[0]) for one, other in pairs}
    moved = sorted((one, other) for one, other in roots if one != other)
    if moved and all("." in one and "." in other for one, other in pairs):
        sentence = f"called through another function: weights built at {moved[0][0]}, called at {moved[0][1]}"
        fix = "compile the module itself, not a function around it, as `entry.compile(model)` does"
        return [Cause(sentence, fix, names)]
    renamed = sorted({segment for one, other in pairs for segment in _segments(one, other)})
    if renamed:
        words = ", ".join(f"{one} → {other}" for one, other in renamed[:4])
        return [Cause(f"attribute renamed: {words}", "build again: the names of attributes are part of the key", names)]
    return [Cause("how the model was compiled (AOT configuration)", _COMPILE_FIX, names)]


def _segments(one: str, other: str) -> list[tuple[str, str]]:
    """Returns the path segments that differ; all of the rest where their number differs."""
    left, right = one.split("."), other.split(".")
    if len(left) != len(right):
        return [(one, other)]
    return [(before, after) for before, after in zip(left, right, strict=True) if before != after]


def _some(paths: list[str]) -> str:
    return ", ".join(paths[-3:]) or "none recorded"


def _code(here: Differences) -> Causes:
    if not here.take("gm"):
        return []
    device = here.setting("default device")
    if device:
        sentence = f"default device: built {device[0]}, called {device[1]}"
        return [Cause(sentence, "call `torch.set_default_device` as the builder did, or on neither side", ("gm",))]
    before, after = (_code_lines(text) for text in here.texts("gm"))
    pairs = zip([*before, *[""] * len(after)], [*after, *[""] * len(before)], strict=True)
    one, other = next(((one, other) for one, other in pairs if one != other), ("", ""))
    sentence = f"the graph's code: built `{short(one)}`, called `{short(other)}`"
    return [Cause(sentence, "build again: the model's code or its arguments are not those that were built", ("gm",))]


def _code_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


RULES: tuple[Callable[[Differences], Causes], ...] = (
    _versions,
    _debugging,
    _another_graph,
    _dynamic,
    _grad_mode,
    _autocast,
    _inputs,
    _dtypes,
    _determinism,
    _matmul,
    _threads,
    _key_tag,
    _mode,
    _inductor_options,
    _functorch,
    _arguments,
    _code,
)


def shape_distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Returns how far two shapes are apart, in factors; infinite for another number of dimensions."""
    if len(one) != len(other):
        return math.inf
    return sum(abs(math.log((left + 1) / (right + 1))) for left, right in zip(one, other, strict=True))
