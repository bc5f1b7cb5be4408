"""The strict reader: one form in, our own error for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain.record import (
    canonical_bytes,
    digest_parts,
    escaped,
    from_json,
    parse_json,
    read_record,
    record_bytes,
)
from cachepipe.errors import IntegrityError


@dataclass(frozen=True)
class Inner:
    name: str
    size: int


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...]
    by_name: Mapping[str, float]
    maybe: str | None = None
    free: Any = None


GOOD = Outer(Inner("a", 1), (Inner("b", 2),), {"x": 1.5}, "text", {"deep": [1, None]})


def test_a_record_survives_its_bytes() -> None:
    assert read_record(Outer, record_bytes(GOOD), "outer", 1 << 20) == GOOD


def test_what_no_utf8_can_say_is_escaped_where_it_is_wished() -> None:
    tree = escaped({"\udcff": ["a\ud800", {"b": "\U0001f600"}, 1, None]})
    assert parse_json(canonical_bytes(tree), "tree", 100) == {"\\udcff": ["a\\ud800", {"b": "\U0001f600"}, 1, None]}
    with pytest.raises(UnicodeEncodeError):
        canonical_bytes({"path": "\udcff"})  # a name in a file table is never another name


def test_equal_trees_have_equal_bytes_and_one_newline() -> None:
    assert canonical_bytes({"b": 1, "a": "ü"}) == '{"a":"ü","b":1}\n'.encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a":1,"a":2}', "given twice"),
        (b'{"a":NaN}', "not a number"),
        (b'{"a":Infinity}', "not a number"),
        (b'{"a":9007199254740993}', "2\\*\\*53"),
        (b'{"a":' + b"9" * 5000 + b"}", "2\\*\\*53"),
        (b'{"a":"\xff"}', "strict JSON"),
        (b"\xef\xbb\xbf{}", "strict JSON"),
        (b"", "strict JSON"),
        (b"{} {}", "strict JSON"),
        (b"[" * 200_000, "strict JSON"),
        (b'{"a":"' + b"x" * 2_000_000 + b'"}', "too long"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_text_that_is_not_strict_is_our_error(data: bytes, words: str) -> None:
    with pytest.raises(IntegrityError, match=words):
        parse_json(data, "text", 1_000_000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": 1}, "unknown field `extra`"),
        ({"inner": None}, "not an object"),
        ({"inner": {"name": "a"}}, "`size` is missing"),
        ({"inner": {"name": "a", "size": True}}, "wrong type"),
        ({"inner": {"name": "a", "size": 1.0}}, "wrong type"),
        ({"many": {}}, "not a list"),
        ({"many": [[]]}, "not an object"),
        ({"by_name": []}, "not an object"),
        ({"by_name": {"x": "1"}}, "wrong type"),
        ({"maybe": 3}, "wrong type"),
    ],
    ids=str,
)
def test_a_tree_of_another_shape_names_the_place(change: dict[str, Any], words: str) -> None:
    tree = parse_json(record_bytes(GOOD), "outer", 1 << 20)
    with pytest.raises(IntegrityError, match=words):
        from_json(Outer, {**tree, **change}, "outer")


_PARTS = st.dictionaries(st.text(max_size=6), st.binary(max_size=6), max_size=4)


@given(_PARTS, _PARTS)
def test_no_two_part_lists_share_a_digest(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    assert (digest_parts(one) == digest_parts(other)) == (one == other)


_TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(_TREES)
def test_canonical_bytes_round_trip(tree: Any) -> None:
    data = canonical_bytes(tree)
    assert canonical_bytes(parse_json(data, "tree", 1 << 20)) == data
