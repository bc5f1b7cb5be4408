"""The engine `aot`: per shape bucket a native function that starts without a trace, and what must be equal to use it.

    <root>/engine/<entry key, 16 digits>/engine.json        the record `EngineFile` below
                                         bucket-0.so        one shared object per shape bucket, weights are arguments
                                         bucket-0.json      only where an operator is called through torch's dispatcher

A native function has no guards. Everything that its trace has read of the module, of the code and of torch's ambient
state stands in `structure` and `ambient` as place → text; the service describes its own in the same way and compares.

A flipped byte in native code ends a process, and a look at sizes and times does not find it. So `engine.json` holds the digest
of each file beside it and, last, its own (`sealed`); whoever loads compares both first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cachepipe.domain.limits import MIB
from cachepipe.domain.record import Json, record_bytes, sha256
from cachepipe.errors import IntegrityError

FORMAT = 1
JIT, AOT = "jit", "aot"
ENGINES = (JIT, AOT)
LAYER = "engine"
"""Its name among the layers of `Lookup`."""
FILE = "engine.json"
FILE_BYTES = 64 * MIB
VARIABLE = "CACHEPIPE_ENGINE"
"""`jit`: the native functions are not used, whatever the artifact holds."""
GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Compile modes in which torch replays from CUDA graphs (`torch._inductor.list_mode_options`, whose import takes a second)."""
_VALUES = ("int", "float", "complex", "str", "bytes")
MAX_WORDS = 3
"""Differences that are quoted; the rest is counted."""


@dataclass(frozen=True)
class BucketFunction:
    """One shape bucket's native function."""

    shape_bucket: str
    """Its label."""
    file: str
    """Beside `engine.json`."""
    signature: Json
    """Parameter name → form of its value, in the order in which the tensors inside are passed: `["tensor", dtype,
    shape, strides, device]`, `["list" | "tuple", […]]`, `["dict", [[key, form], …]]`, `["const", type, value]`."""
    weights: tuple[str, ...]
    """Places of the tensors of the module that are passed before the inputs."""
    output: str
    """How the outputs nest, as torch's pytree writes it; empty: the one tensor itself."""
    leaves: Json
    """Per leaf of the outputs the number of a returned tensor, or `["const", value]`."""


@dataclass(frozen=True)
class EngineFile:
    format: int
    torch_version: str
    parameters: tuple[str, ...]
    """Of the module's `forward`, by which positional arguments are named."""
    code: tuple[str, ...]
    """`module:name` of the functions and classes that the trace went through, and `module` alone where only its whole
    file can be compared."""
    structure: Mapping[str, str]
    ambient: Mapping[str, str]
    functions: tuple[BucketFunction, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → SHA-256 of every file beside or below this one. Empty: of a release that kept none; its files are taken as they are."""
    own: str = ""
    """SHA-256 of this record's bytes with this text empty."""
    unsteady: tuple[str, ...] = ()
    """Places of the module that are not compared and stand nowhere in `structure`; see `unsteady_places`."""


@dataclass(frozen=True)
class Description:
    """A module as one process of the builder describes it before a call, without its code: place → text."""

    texts: Mapping[str, str]


def sealed(facts: EngineFile) -> bytes:
    """Returns the bytes of a record under its own digest."""
    bare = record_bytes(replace(facts, own=""))
    return record_bytes(replace(facts, own=sha256(bare)))


def check_own(facts: EngineFile, data: bytes) -> None:
    """Compares a record's bytes with its own digest, where it has digests.

    Raises:
        IntegrityError: they were changed since they were sealed.
    """
    if facts.files or facts.own:
        found = sha256(data.replace(f'"own":"{facts.own}"'.encode(), b'"own":""'))
        if found != facts.own:
            raise IntegrityError(FILE, "changed since it was built", wanted=facts.own or "a digest", found=found)


def engine_folder(key: str) -> str:
    """Returns the folder of an entry's functions, relative to the root of the tree; the entry's name may change, its key not."""
    return f"engine/{key[:16]}"


def replays_graphs(device: str, mode: str, options: Mapping[str, Json]) -> bool:
    """Tells whether the native functions of an entry are replayed from CUDA graphs: where torch.compile would."""
    return device == "cuda" and bool(options.get("triton.cudagraphs", mode in GRAPH_MODES))


def differences(built: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what differs between two descriptions, in words; empty: they are equal."""
    found = [
        f"{place}: built {built[place]}, here {here[place]}"
        for place in built
        if here.get(place, "") != built[place] and place in here
    ]
    found += [f"{place}: built {built[place]}, here missing" for place in built if place not in here]
    found += [f"{place}: not built, here {here[place]}" for place in here if place not in built]
    return tuple(found)


def unsteady_places(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the places of plain values that differ between two descriptions of the module by the builder's own processes.

    Such a value (a hash of a text, a time) differs in every service too, so comparing it would refuse them all. It need not be
    compared if no call reads it, which the export has to find out.
    """
    return tuple(
        place
        for place, text in one.items()
        if (there := other.get(place, text)) != text
        and place.startswith("self.")
        and text.partition(" ")[0] == there.partition(" ")[0]
        and text.partition(" ")[0] in _VALUES
    )


def in_words(found: tuple[str, ...]) -> str:
    """Returns the first differences, or places, and how many more there are."""
    more = f" (and {len(found) - MAX_WORDS} more)" if len(found) > MAX_WORDS else ""
    return "; ".join(found[:MAX_WORDS]) + more
