"""From a manifest to entries, and from an entry to its key.

The entry key is the digest of everything that can change the compiled result, as named parts: the groups of the
`EntrySpec`, `source:<path>` for every source file and `dist:<name>` for every distribution that the sources import.
Names of the model, tolerance, gates, the manifest's place and comments are not among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cachepipe.domain.engine import FORMAT as ENGINE_FORMAT
from cachepipe.domain.engine import JIT
from cachepipe.domain.entry import Context, DynamicDim, EntrySpec
from cachepipe.domain.manifest import FactoryModel, Manifest
from cachepipe.domain.record import Json, canonical_bytes, digest_parts, read_record, record_bytes, to_json

_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "factory": ("factory",),
        "args": ("args",),
        "call": ("call", "method"),
        "compile": ("fullgraph", "dynamic"),
        "options": ("options",),
        "mode": ("mode",),
        "dtype": ("dtype",),
        "device": ("device",),
        "module": ("eval", "requires_grad", "memory_format"),
        "context": ("context",),
        "inputs": ("inputs",),
        "shape_buckets": ("shape_buckets",),
        "dynamic_dims": ("dynamic_dims",),
        "train": ("train", "loss"),
    }
)
"""Named part → the fields of the spec that it covers."""
CALLING_FORMAT = "2"
"""Raised when `runtime/calling.py` or `runtime/inputs.py` comes to compile or call in another way: what was built before is built anew."""
UNKEYED = ("model", "rtol", "atol")
"""Fields of the spec that cannot change the compiled result."""


def expand(manifest: Manifest, device: str) -> tuple[EntrySpec, ...]:
    """Returns the entries of all factory models for a device: model × dtype × mode, in the manifest's order.

    A spec has the form in which a service reads it from the statement: names of dimensions and inputs are in the order
    of the alphabet, so labels and the order of nested inputs are the same on both sides.
    """
    return tuple(
        _spec(model, dtype, mode, device)
        for model in manifest.models
        if isinstance(model, FactoryModel)
        for dtype in model.dtypes
        for mode in model.modes
    )


def entry_key(
    spec: EntrySpec, sources: Mapping[str, str], versions: Mapping[str, str]
) -> tuple[str, Mapping[str, str]]:
    """Returns the entry key, and every named part with its own digest.

    Args:
        spec: one entry, as `expand` gives it.
        sources: relative path → digest of each source.
        versions: distribution → version of each distribution that the sources import.
    """
    tree = to_json(spec)
    texts = {name: canonical_bytes({field: tree[field] for field in fields}) for name, fields in _PARTS.items()}
    if spec.engine != JIT:  # the default adds nothing: what was built before there were engines keeps its key
        texts["engine"] = f"{spec.engine} {ENGINE_FORMAT}".encode()
    texts["calling"] = CALLING_FORMAT.encode()
    texts |= {f"source:{path}": digest.encode() for path, digest in sources.items()}
    texts |= {f"dist:{name}": version.encode() for name, version in versions.items()}
    parts = {name: digest_parts({name: text}) for name, text in sorted(texts.items())}
    return digest_parts(parts), parts


def _spec(model: FactoryModel, dtype: str, mode: str, device: str) -> EntrySpec:
    inputs = _typed(model.inputs, dtype)
    if model.call == "args" and isinstance(inputs, dict):
        inputs = list(inputs.values())  # canonical JSON keeps the order of lists only
    context = model.context
    spec = EntrySpec(
        model=model.name,
        dtype=dtype,
        mode=mode,
        device=device,
        factory=model.factory,
        args=model.args,
        method=model.method,
        call=model.call,
        fullgraph=model.compile.fullgraph,
        dynamic=model.compile.dynamic,
        options=model.compile.options,
        eval=model.eval,
        requires_grad=model.requires_grad or model.train,
        memory_format=model.memory_format,
        context=Context(
            grad="grad" if model.train else context.grad,
            autocast=context.autocast,
            matmul_precision=context.matmul_precision,
            deterministic=context.deterministic,
        ),
        inputs=inputs,
        shape_buckets=model.shape_buckets,
        dynamic_dims={name: DynamicDim(bounds.min, bounds.max) for name, bounds in model.dynamic_dims.items()},
        train=model.train,
        loss=model.loss,
        rtol=model.tolerance.of(dtype).rtol,
        atol=model.tolerance.of(dtype).atol,
        engine=model.compile.engine,
    )
    data = record_bytes(spec)
    return read_record(EntrySpec, data, f"entry {spec.id}", len(data))


def _typed(inputs: Json, dtype: str) -> Json:
    """Returns the inputs with the entry's dtype in every tensor that names none."""
    if isinstance(inputs, str):
        return inputs
    if isinstance(inputs, list):
        return [_typed(item, dtype) for item in inputs]
    if isinstance(inputs.get("shape"), list):
        return {**inputs, "dtype": inputs["dtype"] or dtype}
    if set(inputs) == {"const"}:
        return inputs
    return {name: _typed(item, dtype) for name, item in inputs.items()}
