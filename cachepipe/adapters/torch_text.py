"""Texts of plain values, and which code is a library's: what descriptions of modules are made of.

Equal values have equal texts in every process: nothing here holds an address, a line number or the order of a set.
"""

from __future__ import annotations

import enum
import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import torch

MAX_DEPTH = 6
"""Containers within containers."""
_SHOWN_CHARS = 120
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.layout)
_PLAIN_TYPES = (*_PLAIN, torch.Size, torch.memory_format)
_TORCH_NEEDS = ("sympy", "mpmath", "networkx", "numpy", "optree", "jinja2", "filelock", "fsspec")
_PACKAGING = ("typing_extensions", "setuptools", "_distutils_hack", "pkg_resources")
"""What torch itself runs while it traces."""


def is_library(module: str) -> bool:
    """Tells whether a module belongs to torch (or what it needs), Python or us: their versions are compared elsewhere."""
    top = module.partition(".")[0]
    is_generated = top.startswith("namedtuple_")  # the scope in which collections.namedtuple makes a class
    return top in ("torch", "cachepipe", *_TORCH_NEEDS, *_PACKAGING) or is_generated or top in sys.stdlib_module_names


def plain_text(value: Any, depth: int = 0) -> str | None:
    """Returns the text of a value that is nothing but plain values; None for any other, and for what holds itself."""
    if type(value) in _PLAIN_TYPES:
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{name_of(type(value))}.{value.name}"
    if depth > MAX_DEPTH:
        return None
    if type(value) in (list, tuple, set, frozenset):
        items = [plain_text(item, depth + 1) for item in value]
        if any(item is None for item in items):
            return None
        shown = [f"{type(item).__name__} {text}" for item, text in zip(value, items, strict=True)]
        return f"[{', '.join(sorted(shown) if isinstance(value, (set, frozenset)) else shown)}]"
    if type(value) is dict:
        return _dict_text(value, depth + 1)
    return None


def _dict_text(value: Mapping[Any, Any], depth: int) -> str | None:
    rows = []
    for key, item in value.items():
        name, text = plain_text(key, depth), plain_text(item, depth)
        if name is None or text is None:
            return None
        rows.append(f"{name}: {type(item).__name__} {text}")
    return f"{{{', '.join(rows)}}}"


def shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… {digest_of(text)}"


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def const_text(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(const_text, value))}"
    if isinstance(value, tuple):
        return f"tuple {[*map(const_text, value)]}"
    return f"{type(value).__name__} {value!r}"
