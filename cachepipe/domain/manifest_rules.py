"""Rules of a manifest that look into trees or at several fields: plain values, inputs, shape buckets.

Each function reads what YAML gave, returns the normal form, and appends a `Problem` for everything that is wrong,
with its place relative to the field, so that a manifest's problems are all known at once.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from cachepipe.domain.engine import AOT
from cachepipe.domain.record import MAX_INT, Json

Place: TypeAlias = tuple[str | int, ...]

FLOATING = ("float32", "bfloat16", "float16", "float64")
INTEGER = ("int64", "int32", "int16", "int8", "uint8")
INPUT_DTYPES = (*FLOATING, *INTEGER, "bool")
MAX_SHAPE_BUCKETS = 1000
"""Per model, after products; each is compiled and proved, and stands in a statement of at most 256 KiB."""

REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""`module:attribute`, both may be dotted."""
SYMBOL = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LEAF_FIELDS = ("shape", "dtype", "low", "high", "fill")


class Problem(NamedTuple):
    place: Place
    """Path in the manifest, e.g. `("models", 0, "dtypes", 1)`."""
    message: str


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean …` with the nearest known name, or all known names when none is near."""
    names = list(known)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean `{found[0]}`?" if found else f"; known: {', '.join(names)}"


def unknown_names(given: Iterable[str], known: Sequence[str], what: str, place: Place = ()) -> list[Problem]:
    """Returns a problem for every given name that is not known."""
    return [
        Problem((*place, name), f"unknown {what} `{name[:80]}`{nearest(name, known)}")
        for name in given
        if name not in known
    ]


def plain_problems(tree: Json, place: Place = ()) -> list[Problem]:
    """Returns what in a tree cannot be written to a statement: JSON's types only, finite, integers up to 2**53."""
    if isinstance(tree, Mapping):
        return [problem for key, item in tree.items() for problem in plain_problems(item, (*place, key))]
    if isinstance(tree, (list, tuple)):
        return [problem for i, item in enumerate(tree) for problem in plain_problems(item, (*place, i))]
    if isinstance(tree, float) and not math.isfinite(tree):
        return [Problem(place, "not a finite number")]
    if isinstance(tree, int) and abs(tree) > MAX_INT:
        return [Problem(place, "an integer beyond 2**53")]
    if tree is None or isinstance(tree, (str, bool, int, float)):
        return []
    return [Problem(place, f"not a plain value: {type(tree).__name__}")]


def read_inputs(tree: Json, problems: list[Problem], place: Place = ()) -> Json:
    """Returns the normal form of `inputs`: every leaf is a tensor (with `shape`) or `{"const": value}`.

    A mapping with a list under `shape` is a tensor; a mapping with the only key `const` is a constant of any form;
    other mappings and lists nest, and use neither name; everything else is a constant.
    """
    if isinstance(tree, Mapping):
        is_named = bool(place)  # the top level is the call itself
        if is_named and isinstance(tree.get("shape"), (list, tuple)):
            return _tensor(tree, problems, place)
        reserved = [] if is_named and set(tree) == {"const"} else [name for name in ("shape", "const") if name in tree]
        if reserved:
            text = f"`{reserved[0]}` marks a tensor or a constant here: an input of that name needs a function"
            problems.append(Problem((*place, reserved[0]), text))
            return {}
        if set(tree) == {"const"}:
            problems += plain_problems(tree["const"], (*place, "const"))
            return dict(tree)
        if tree.get("dtype") in INPUT_DTYPES:
            problems.append(Problem(place, "a tensor needs `shape`, a list of sizes and symbolic dimensions"))
        return {key: read_inputs(item, problems, (*place, key)) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [read_inputs(item, problems, (*place, i)) for i, item in enumerate(tree)]
    problems += plain_problems(tree, place)
    return {"const": tree}


def _tensor(leaf: Mapping[str, Any], problems: list[Problem], place: Place) -> Json:
    problems += unknown_names(leaf, _LEAF_FIELDS, "field of a tensor", place)
    for i, size in enumerate(leaf["shape"]):
        is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        if not is_size and not (isinstance(size, str) and SYMBOL.fullmatch(size)):
            problems.append(Problem((*place, "shape", i), f"not a size or a symbolic dimension: `{size}`"))
    dtype = leaf.get("dtype")
    if dtype is not None and dtype not in INPUT_DTYPES:
        text = f"unknown dtype `{dtype}`{nearest(str(dtype), INPUT_DTYPES)}"
        problems.append(Problem((*place, "dtype"), text))
    else:
        problems += _value_problems(leaf, dtype, place)
    tensor = {name: leaf[name] for name in ("fill", "low", "high") if leaf.get(name) is not None}
    if dtype in INTEGER and "high" in tensor:
        tensor.setdefault("low", 0)
    return {"shape": list(leaf["shape"]), "dtype": dtype, **tensor}


def _value_problems(leaf: Mapping[str, Any], dtype: str | None, place: Place) -> list[Problem]:
    fill, low, high = (leaf.get(name) for name in ("fill", "low", "high"))
    given = {name: value for name, value in (("fill", fill), ("low", low), ("high", high)) if value is not None}
    kinds = {"bool": (bool,)}.get(dtype or "", (int,) if dtype in INTEGER else (int, float))
    for name, value in given.items():
        is_beyond = dtype in INTEGER and not _is_held(value - (name == "high"), dtype) if type(value) is int else False
        if type(value) not in kinds or plain_problems(value) or is_beyond:
            text = f"not a value of a {dtype or 'floating'} tensor: `{str(value)[:80]}`"
            return [Problem((*place, name), text)]
    if fill is not None:
        return [Problem((*place, "fill"), "`fill` excludes `low` and `high`")] if len(given) > 1 else []
    if dtype == "bool":
        return [Problem(place, "a bool tensor needs `fill` and has no `low` or `high`")]
    if dtype in INTEGER:
        if high is None:
            return [Problem(place, "an integer tensor needs `fill`, or `high` (values lie below it) with `low`")]
        low = 0 if low is None else low
    if (low is None) != (high is None):
        return [Problem(place, "`low` and `high` go together")]
    if low is not None and high is not None and low >= high:
        return [Problem((*place, "high"), f"`high` is not above `low`: {high} <= {low}")]
    return []


def _is_held(value: int, dtype: str) -> bool:
    """Tells whether an integer dtype, whose name says its bits, holds a value."""
    bits = int(dtype.lstrip("uint"))
    low = 0 if dtype.startswith("u") else -(1 << bits - 1)
    return low <= value < low + (1 << bits)


def symbols(inputs: Json) -> dict[str, Place]:
    """Returns every symbolic dimension of an `inputs` tree in its normal form, with the first place of its use."""
    found: dict[str, Place] = {}

    def visit(tree: Json, place: Place) -> None:
        if isinstance(tree, list):
            for i, item in enumerate(tree):
                visit(item, (*place, i))
        elif isinstance(tree.get("shape"), list):
            for i, size in enumerate(tree["shape"]):
                if isinstance(size, str):
                    found.setdefault(size, (*place, "shape", i))
        elif set(tree) != {"const"}:
            for key, item in tree.items():
                visit(item, (*place, key))

    if not isinstance(inputs, str):
        visit(inputs, ())
    return found


def read_shape_buckets(rows: Json, problems: list[Problem]) -> tuple[dict[str, int], ...]:
    """Returns the shape buckets of a list of mappings, in order; a list of sizes is a product, the last one fastest."""
    if not isinstance(rows, (list, tuple)) or not rows:
        problems.append(Problem((), "not a list of mappings with at least one shape bucket"))
        return ()
    found: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
    for i, row in enumerate(rows):
        sizes = _sizes(row, problems, (i,))
        if len(found) + math.prod(map(len, sizes.values())) > MAX_SHAPE_BUCKETS:
            problems.append(Problem((i,), f"more than {MAX_SHAPE_BUCKETS} shape buckets"))
            return ()
        for values in itertools.product(*sizes.values()):
            bucket = dict(zip(sizes, values, strict=True))
            identity = tuple(sorted(bucket.items()))
            if identity in found:
                label = ", ".join(f"{name}: {size}" for name, size in bucket.items())
                problems.append(Problem((i,), f"shape bucket given twice: {label or 'without dimensions'}"))
            found[identity] = bucket
    return tuple(found.values())


def _sizes(row: Json, problems: list[Problem], place: Place) -> dict[str, list[int]]:
    if not isinstance(row, Mapping):
        problems.append(Problem(place, "a shape bucket is a mapping of dimension to size"))
        return {"": []}
    sizes: dict[str, list[int]] = {}
    for name, value in row.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not SYMBOL.fullmatch(name):
            problems.append(Problem((*place, name), "not the name of a dimension"))
        if not values:
            problems.append(Problem((*place, name), "a list of sizes without a size"))
        for size in values:
            if type(size) is not int or not 1 <= size <= MAX_INT:
                problems.append(Problem((*place, name), f"not a size (an integer above 0): `{str(size)[:80]}`"))
        sizes[name] = [size for size in values if type(size) is int]
    return sizes


def dimension_problems(rows: Sequence[Mapping[str, Any]], inputs: Json) -> list[Problem]:
    """Returns where shape buckets and inputs disagree: every varying dimension must be named, every name used.

    Args:
        rows: the manifest's `shape_buckets`, products not expanded.
        inputs: the normal form, or the text `module:function`, whose dimensions only the function knows.
    """
    problems: list[Problem] = []
    is_function = isinstance(inputs, str)
    wanted = list(rows[0]) if is_function else list(symbols(inputs))
    for i, row in enumerate(rows):
        for name in [name for name in wanted if name not in row]:
            where = "the first shape bucket" if is_function else "`inputs`"
            problems.append(Problem((i,), f"dimension `{name}` of {where} is missing"))
        for name in [name for name in row if name not in wanted]:
            where = "the first shape bucket" if is_function else "any tensor of `inputs`"
            problems.append(Problem((i, name), f"dimension `{name}` is not in {where}{nearest(name, wanted)}"))
    return problems


def dynamic_problems(
    bounds: Mapping[str, tuple[int, int]], inputs: Json, buckets: Sequence[Mapping[str, int]]
) -> list[Problem]:
    """Returns what is wrong with dynamic dimensions, given as name → (min, max)."""
    if bounds and isinstance(inputs, str):
        return [Problem((), "needs `inputs` written out: a function does not say which dimension of a tensor it is")]
    known = list(symbols(inputs))
    problems = unknown_names(bounds, known, "dimension")
    for name, (low, high) in bounds.items():
        if high < low:
            problems.append(Problem((name, "max"), f"below `min`: {high} < {low}"))
        elif name in known and not any(low <= bucket.get(name, 0) <= high for bucket in buckets):
            problems.append(Problem((name,), f"no shape bucket has a size of `{name}` in {low}..{high}: never traced"))
    return problems


def engine_problems(model: Any) -> list[Problem]:
    """Returns what a native function (`compile: {engine: aot}`) cannot do of what a model's manifest asks."""
    if model.compile.engine != AOT:
        return []
    rows = (
        (not model.compile.fullgraph, ("compile", "fullgraph"), "one graph without breaks"),
        (model.compile.dynamic, ("compile", "dynamic"), "static shapes: list them in `shape_buckets`"),
        (bool(model.dynamic_dims), ("dynamic_dims",), "static shapes: list them in `shape_buckets`"),
        (model.train, ("train",), "no backward"),
        (model.context.grad == "grad", ("context", "grad"), "`inference_mode` or `no_grad`"),
        (model.method != "forward", ("method",), "the method `forward`"),
    )
    return [Problem(place, f"`engine: aot` needs {words}") for is_wrong, place, words in rows if is_wrong]
