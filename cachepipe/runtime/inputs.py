"""Example inputs of a shape bucket, the same bytes in every process: builder, prover and service warm up alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cachepipe.domain.entry import EntrySpec, ShapeBucket
from cachepipe.domain.record import Json
from cachepipe.errors import UsageError

if TYPE_CHECKING:
    import torch


def resolve(reference: str) -> Any:
    """Returns the object named `module:attribute`.

    Raises:
        UsageError: the module does not hold the attribute; an error inside the module passes through.
    """
    module_name, _, path = reference.partition(":")
    found: Any = import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise UsageError(f"`{reference}` does not exist: `{module_name}` has no `{path}`")
        found = getattr(found, name)
    return found


def example_inputs(spec: EntrySpec, shape_bucket: ShapeBucket) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments for one call at a shape bucket.

    Tensors lie on the spec's device, filled from a generator seeded by their name: floating ones standard normal,
    integers in [low, high), or `fill`. Dynamic dimensions are marked, except at size 1, which torch specialises. They are
    never born in inference mode, whatever mode is on: torch's guards tell the two kinds apart, and a service makes its
    tensors before it enters the calling context.
    """
    import torch

    with torch.inference_mode(False):
        if isinstance(spec.inputs, str):
            return _from_function(spec.inputs, shape_bucket, has_gpu=spec.device == "cuda")
        if isinstance(spec.inputs, list):
            return tuple(_make(spec, leaf, shape_bucket, f"{i}") for i, leaf in enumerate(spec.inputs)), {}
        return (), {name: _make(spec, leaf, shape_bucket, name) for name, leaf in spec.inputs.items()}


def _from_function(reference: str, shape_bucket: ShapeBucket, has_gpu: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    # seeded: inputs that the function draws must be the same when eager is asked for the same call
    with torch.random.fork_rng(devices=None if has_gpu else []):
        torch.manual_seed(0)
        found = resolve(reference)(dict(shape_bucket))
    try:
        args, kwargs = found
        return tuple(args), dict(kwargs)
    except (TypeError, ValueError) as error:
        text = f"`{reference}` returned {type(found).__name__}: wanted a pair of args and kwargs"
        raise UsageError(text) from error


def _make(spec: EntrySpec, tree: Json, shape_bucket: ShapeBucket, path: str) -> Any:
    if isinstance(tree, list):
        return [_make(spec, leaf, shape_bucket, f"{path}[{i}]") for i, leaf in enumerate(tree)]
    if not isinstance(tree, Mapping):
        return tree
    if "const" in tree:
        return tree["const"]
    if "shape" in tree:
        return _tensor(spec, tree, shape_bucket, path)
    return {name: _make(spec, leaf, shape_bucket, f"{path}.{name}") for name, leaf in tree.items()}


def _tensor(spec: EntrySpec, leaf: Mapping[str, Json], shape_bucket: ShapeBucket, path: str) -> torch.Tensor:
    import torch

    dims = leaf["shape"]
    shape = [shape_bucket[dim] if isinstance(dim, str) else dim for dim in dims]
    dtype: torch.dtype = getattr(torch, leaf["dtype"])
    generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    if leaf.get("fill") is not None:
        tensor = torch.full(shape, leaf["fill"], dtype=dtype)
    elif dtype == torch.bool:
        tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    elif dtype.is_floating_point or dtype.is_complex:
        tensor = _floating(leaf, shape, generator).to(dtype)
    else:
        low, high = leaf.get("low"), leaf.get("high")
        tensor = torch.randint(
            0 if low is None else low, 2 if high is None else high, shape, generator=generator, dtype=dtype
        )
    tensor = tensor.to(spec.device)
    if spec.memory_format == "channels_last" and tensor.dim() == 4 and dtype.is_floating_point:
        tensor = tensor.to(memory_format=torch.channels_last)
    _mark(spec, tensor, dims, shape)
    return tensor


def _floating(leaf: Mapping[str, Json], shape: list[int], generator: torch.Generator) -> torch.Tensor:
    import torch

    low, high = leaf.get("low"), leaf.get("high")
    if low is None and high is None:
        return torch.randn(shape, generator=generator)
    low = 0.0 if low is None else low
    high = 1.0 if high is None else high
    return torch.rand(shape, generator=generator) * (high - low) + low


def _mark(spec: EntrySpec, tensor: torch.Tensor, dims: list[str | int], shape: list[int]) -> None:
    from cachepipe.adapters.torch_settings import mark_dynamic

    for index, dim in enumerate(dims):
        bounds = spec.dynamic_dims.get(dim) if isinstance(dim, str) else None
        if bounds is not None and shape[index] > 1 and bounds.min <= shape[index] <= bounds.max:
            mark_dynamic(tensor, index, bounds.min, bounds.max)
