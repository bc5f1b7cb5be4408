"""One bounded, strict reader and writer for everything that a restore parses.

A record is a frozen dataclass. Its JSON form is an object with exactly the dataclass's fields: an unknown, missing
or twice-given field, a number out of range, a NaN or an infinity, a wrong type or a text that is not UTF-8 is an
`IntegrityError` that names the place. Fields with a default may be absent.

Supported field types: str, int, float, bool, None, `X | None`, `tuple[X, ...]`, `Mapping[str, X]`,
other records, and `Json` for a free tree.

Canonical bytes: keys sorted, no spaces, UTF-8, one newline at the end.

    >>> canonical_bytes({"b": 1, "a": [True, None]})
    b'{"a":[true,null],"b":1}\\n'
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias, TypeVar

from cachepipe.errors import IntegrityError

Json: TypeAlias = Any
"""A free JSON tree, bounded by the size of the text it came from."""

MAX_INT = 2**53
"""Beyond it JSON numbers are not exact in other languages, and no size or count of ours is larger."""

_HEX = frozenset("0123456789abcdef")

R = TypeVar("R")


def sha256(data: bytes | memoryview) -> str:
    """Returns the SHA-256 of `data` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Tells whether a text is what `sha256` returns."""
    return len(text) == 64 and not set(text) - _HEX


def canonical_bytes(value: Json) -> bytes:
    """Returns the one byte form of a JSON tree; equal trees have equal bytes.

    Raises:
        ValueError: the tree holds NaN or an infinity.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def digest_parts(parts: Mapping[str, bytes | str]) -> str:
    """Returns one digest over named parts, each framed by explicit lengths, so that no two part lists share it."""
    whole = hashlib.sha256()
    for name in sorted(parts):
        value = parts[name]
        # names of files and variables may hold bytes that are no UTF-8, which Python gives as lone surrogates
        data = value.encode(errors="surrogateescape") if isinstance(value, str) else value
        whole.update(b"%d:%s=%d:" % (len(name.encode()), name.encode(), len(data)))
        whole.update(data)
    return whole.hexdigest()


def parse_json(data: bytes, what: str, limit_bytes: int) -> Json:
    """Returns the JSON tree in `data`.

    Args:
        data: the whole text.
        what: the object's name for messages.
        limit_bytes: longer texts are refused unread.

    Raises:
        IntegrityError: too long, not UTF-8, not JSON, a key given twice, NaN, a number beyond every float, an integer beyond 2**53, nested beyond the parser's stack,
            half of a surrogate pair, which no UTF-8 can say.
    """
    if len(data) > limit_bytes:
        raise IntegrityError(what, "too long", wanted=f"<= {limit_bytes} bytes", found=len(data))
    try:
        tree = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
        if b"\\u" in data:
            json.dumps(tree, ensure_ascii=False).encode()
        return tree
    except (ValueError, RecursionError) as error:
        raise IntegrityError(what, f"not strict JSON ({error})") from error


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a key is given twice")
    return tree


def _no_constant(text: str) -> Json:
    raise ValueError(f"{text} is not a number")


def _bounded_int(text: str) -> int:
    if len(text) < 16:
        return int(text)
    value = int(text) if len(text) < 24 else MAX_INT + 1
    if abs(value) > MAX_INT:
        raise ValueError("an integer beyond 2**53")
    return value


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # `1e999` is well-formed
        raise ValueError(f"{text[:64]} is not a number")
    return value


def finite(tree: Json) -> Json:
    """Returns the tree with null for every NaN and infinity: JSON has neither, and a reader of ours refuses both."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def to_json(record: Any) -> Json:
    """Returns the JSON tree of a record."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, Mapping):
        return {key: to_json(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_json(value) for value in record]
    return record


def record_bytes(record: Any) -> bytes:
    """Returns the canonical bytes of a record."""
    return canonical_bytes(to_json(record))


def escaped(tree: Json) -> Json:
    """Returns the tree with a backslash escape for what no UTF-8 can say, as names of files and words of errors may hold."""
    if isinstance(tree, dict):
        return {escaped(key): escaped(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [escaped(value) for value in tree]
    return tree.encode(errors="backslashreplace").decode() if isinstance(tree, str) else tree


def read_record(cls: type[R], data: bytes, what: str, limit_bytes: int) -> R:
    """Returns the record of type `cls` in `data`.

    Raises:
        IntegrityError: as `parse_json`, or the tree does not have exactly the fields and types of `cls`.
    """
    return from_json(cls, parse_json(data, what, limit_bytes), what)


def from_json(cls: type[R], tree: Json, what: str) -> R:
    """Returns the record of type `cls` in a JSON tree; see `read_record`."""
    value = _read(cls, tree, what)
    return typing.cast(R, value)


@cache
def _fields(cls: type) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return tuple(
        (f.name, hints[f.name], f.default is missing and f.default_factory is missing) for f in dataclasses.fields(cls)
    )


def _read(kind: Any, tree: Json, where: str) -> Any:
    if kind is Any:
        return tree
    if kind in (str, int, bool, float, type(None)):
        return _scalar(kind, tree, where)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _optional(arguments, tree, where)
    if origin is tuple:
        if not isinstance(tree, list):
            raise IntegrityError(where, "not a list", wanted="list", found=type(tree).__name__)
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(tree))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(tree, dict):
            raise IntegrityError(where, "not an object", wanted="object", found=type(tree).__name__)
        return {key: _read(arguments[1], item, f"{where}.{key[:64]}") for key, item in tree.items()}
    return _object(kind, tree, where)


def _scalar(kind: type, tree: Json, where: str) -> Any:
    if kind is float and type(tree) is int:
        return float(tree)
    if type(tree) is not kind:
        raise IntegrityError(where, "wrong type", wanted=kind.__name__, found=type(tree).__name__)
    return tree


def _optional(arguments: tuple[Any, ...], tree: Json, where: str) -> Any:
    if tree is None and type(None) in arguments:
        return None
    (kind,) = [argument for argument in arguments if argument is not type(None)]
    return _read(kind, tree, where)


def _object(cls: type, tree: Json, where: str) -> Any:
    if not isinstance(tree, dict):
        raise IntegrityError(where, "not an object", wanted=cls.__name__, found=type(tree).__name__)
    known = _fields(cls)
    unknown = sorted(set(tree) - {name for name, _, _ in known})
    if unknown:
        raise IntegrityError(where, f"unknown field `{unknown[0][:64]}`")
    values = {}
    for name, kind, is_required in known:
        if name in tree:
            values[name] = _read(kind, tree[name], f"{where}.{name}")
        elif is_required:
            raise IntegrityError(where, f"field `{name}` is missing")
    return cls(**values)
