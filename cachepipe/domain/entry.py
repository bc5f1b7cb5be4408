"""The settings of one entry: everything that builder and service must do alike.

An entry is model × dtype × compile mode with all its shape buckets. The spec is written by the builder from the
manifest, signed inside the statement, and read by the service: both sides call the same functions with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cachepipe.domain.engine import JIT
from cachepipe.domain.record import Json

ShapeBucket: TypeAlias = Mapping[str, int]
"""Symbolic dimension → size, e.g. `{"batch": 8, "seq": 128}`."""


@dataclass(frozen=True)
class DynamicDim:
    """Bounds of a symbolic dimension that is traced as dynamic, both included."""

    min: int
    max: int


@dataclass(frozen=True)
class Context:
    """The ambient state around every call; most of it is part of torch's keys."""

    grad: str
    """`inference_mode`, `no_grad` or `grad`."""
    autocast: str | None
    """dtype name of `torch.autocast` on the entry's device, or None for off."""
    matmul_precision: str
    deterministic: bool


@dataclass(frozen=True)
class EntrySpec:
    """One entry; see the module's docstring."""

    model: str
    dtype: str
    """torch's name: `float32`, `bfloat16`, …; parameters and floating inputs."""
    mode: str
    device: str
    """`cpu` or `cuda`."""
    factory: str
    """`module:attribute` → callable; called with `args` it gives the nn.Module or callable to compile."""
    args: Json
    """Keyword arguments of the factory."""
    method: str
    """The module's method that is compiled and called; `forward` compiles the module itself."""
    call: str
    """`kwargs`: inputs are passed by name; `args`: in the manifest's order, `inputs` is a list then."""
    fullgraph: bool
    dynamic: bool
    options: Json
    """Inductor options on top of the mode's."""
    eval: bool
    requires_grad: bool
    memory_format: str
    """`contiguous` or `channels_last`."""
    context: Context
    inputs: Json
    """A dict (call by name) or a list (call by position) of trees of dicts and lists; a tensor leaf is `{"shape": …, "dtype": …, "low"|"high"|"fill": …}`, a constant leaf
    `{"const": value}`; or one text `module:function` (shape bucket → args, kwargs)."""
    shape_buckets: tuple[Mapping[str, int], ...]
    """In the manifest's order, which is the order of warm-up."""
    dynamic_dims: Mapping[str, DynamicDim]
    train: bool
    loss: str | None
    """`module:function` (outputs → scalar); None: the sum of the floating outputs."""
    rtol: float
    atol: float
    engine: str = JIT
    """`jit`: torch.compile from the restored tree; `aot`: native functions that need no trace, the tree for all else."""

    @property
    def id(self) -> str:
        """`model/dtype/mode`, unique in a release and target."""
        return f"{self.model}/{self.dtype}/{self.mode}"


def bucket_label(shape_bucket: ShapeBucket) -> str:
    """Returns `batch=8,seq=128`; `-` for an entry without symbolic dimensions."""
    return ",".join(f"{name}={size}" for name, size in shape_bucket.items()) or "-"


def traced_bucket(spec: EntrySpec, shape_bucket: ShapeBucket) -> tuple[tuple[str, int | str], ...]:
    """Returns what a shape bucket is traced as: shape buckets with equal results share their graphs.

    A dynamic dimension within its bounds is one symbol, except size 1, which torch always specialises.
    """
    traced: list[tuple[str, int | str]] = []
    for name, size in shape_bucket.items():
        bounds = spec.dynamic_dims.get(name)
        is_symbol = bounds is not None and size > 1 and bounds.min <= size <= bounds.max
        traced.append((name, "dynamic" if is_symbol else size))
    return tuple(traced)


def is_covered(spec: EntrySpec, dims: ShapeBucket) -> bool:
    """Tells whether a call with these sizes finds its graphs in the artifact; unnamed dimensions may have any covered size."""
    wanted = traced_bucket(spec, dims)
    return any(all(item in traced_bucket(spec, shape_bucket) for item in wanted) for shape_bucket in spec.shape_buckets)
