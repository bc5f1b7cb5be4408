"""Two sets of named key components beside each other, and readers for the texts that torch gives some of them.

A component is [hash, text]. Hashes are compared; texts are only shown: they are cut, and some hold addresses.

Source: torch/_inductor/codecache.py (`TensorMetadata`, `FxGraphHashDetails`), _functorch/_aot_autograd/autograd_cache.py;
read in 2.13.0.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cachepipe.domain.record import Json

TEXT_CHARS = 120
_FIELD = re.compile(r"(\w+)=(torch\.Size\(\[[^\]]*\]\)|device\([^)]*\)|\([^)]*\)|[^,()]*)")
_DEVICE = re.compile(r"type='(\w+)'(?:, index=(\d+))?")


class Cause(NamedTuple):
    """What makes two keys differ, what mends it, and the components that it accounts for."""

    cause: str
    fix: str
    components: tuple[str, ...]


@dataclass
class Differences:
    """The differing components of one miss; rules take away what they account for."""

    built: Mapping[str, Json]
    found: Mapping[str, Json]
    built_settings: Mapping[str, str] = field(default_factory=dict)
    found_settings: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)
    """`dynamo`, `functorch`, `inductor` → option → (built, found), for those that differ."""
    paths: tuple[str, ...] = ()
    """Of the graph's arguments in this process, in order, where the outer layer told them."""
    names: set[str] = field(init=False)

    def __post_init__(self) -> None:
        every = {*self.built, *self.found}
        self.names = {name for name in every if digest_of(self.built, name) != digest_of(self.found, name)}

    def take(self, *patterns: str) -> tuple[str, ...]:
        """Returns the differing names that fit a pattern (`*` is any text, brackets are plain) and counts them explained."""
        wanted = [re.compile(fnmatch.translate(pattern.replace("[", "[[]"))) for pattern in patterns]
        taken = sorted(name for name in self.names if any(pattern.fullmatch(name) for pattern in wanted))
        self.names -= set(taken)
        return tuple(taken)

    def texts(self, name: str) -> tuple[str, str]:
        """Returns the built and the found text of a component."""
        return text_of(self.built, name), text_of(self.found, name)

    def setting(self, name: str) -> tuple[str, str] | None:
        """Returns the two values of an ambient setting, None if it is equal or not known on one side."""
        before, after = self.built_settings.get(name), self.found_settings.get(name)
        return None if before is None or after is None or before == after else (before, after)

    def variables(self) -> dict[str, tuple[str, str]]:
        """Returns the environment variables that differ, as (built, found)."""
        names = {name for name in {*self.built_settings, *self.found_settings} if name.startswith("variable ")}
        pairs = {name: (self.built_settings.get(name, ""), self.found_settings.get(name, "")) for name in names}
        return {name.removeprefix("variable "): pair for name, pair in sorted(pairs.items()) if pair[0] != pair[1]}


def digest_of(components: Mapping[str, Json], name: str) -> str:
    value = components.get(name)
    return str(value[0]) if isinstance(value, list) and value else ""


def text_of(components: Mapping[str, Json], name: str) -> str:
    value = components.get(name)
    return str(value[1]) if isinstance(value, list) and len(value) > 1 else ""


def short(text: str) -> str:
    """Returns a text on one line, cut; `nothing` for an empty one."""
    line = " ".join(text.split())
    return (line if len(line) <= TEXT_CHARS else f"{line[: TEXT_CHARS - 1]}…") or "nothing"


def tensor_facts(text: str) -> dict[str, str]:
    """Returns the fields of an input's text as a person writes them; {} where the input is no tensor.

    >>> tensor_facts("TensorMetadata(dtype=torch.bfloat16, shape=torch.Size([4, 8]), device=device(type='cuda', index=0))")
    {'dtype': 'bfloat16', 'shape': '(4, 8)', 'device': 'cuda:0'}
    """
    kind, _, rest = text.partition("(")
    if not kind.startswith("TensorMetadata"):
        return {}
    facts = {}
    for name, value in _FIELD.findall(rest):
        device = _DEVICE.search(value)
        if value.startswith("torch.Size"):
            facts[name] = f"({value[len('torch.Size([') : -2]})"
        elif device and name == "device":
            facts[name] = f"{device[1]}:{device[2]}" if device[2] else device[1]
        else:
            facts[name] = value.removeprefix("torch.").strip()
    return facts


def sizes(shape: str) -> tuple[int, ...] | None:
    """Returns the numbers of `(4, 8)`; None where a size is symbolic."""
    words = [word.strip() for word in shape.strip("()").split(",") if word.strip()]
    return tuple(int(word) for word in words) if all(word.isdigit() for word in words) else None


def source_paths(text: str) -> list[str]:
    """Returns the arguments' paths of an AOT configuration: `self.a.weight`, `closure:net.a.weight`, `x`; of a cut text those
    that are whole."""
    begin, end = text.find("["), text.find("]")
    inner = text[begin + 1 : end] if 0 <= begin < end else ""
    if end < 0 <= begin:
        inner = text[begin + 1 :].rpartition(",")[0]
    return [path.strip() for path in inner.split(",") if path.strip()]


def fewest_differences(found: Mapping[str, Json], candidates: Iterable[str], built: Mapping[str, Json]) -> str | None:
    """Returns the key among `candidates` whose components differ least; the first of equals, None without any."""

    def distance(key: str) -> int:
        return len(Differences(built[key], found).names)

    known = [key for key in candidates if isinstance(built.get(key), dict) and built[key]]
    return min(known, key=distance) if known else None
