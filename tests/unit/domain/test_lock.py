"""Lock files: what is none is refused as strictly as a trust policy, and the hint says how to get one."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain.fingerprint import Part
from cachepipe.domain.index import IndexRow
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.lock import FORMAT, Lock, lock_bytes, read_lock
from cachepipe.errors import IntegrityError

PARTS = (Part("device", "cpu"), Part("torch", "2.13.0"))
ROW = IndexRow("01JC0000000000000000000000", "a" * 64, 3000, 600_000, "cpu", PARTS, "2026-11-30T10:00:00Z")
LOCK = Lock(FORMAT, "text-encoder", "stable", 42, (ROW,), "/var/cache/cachepipe/text-encoder")


def changed(where: str, value: Any) -> bytes:
    """Returns the lock file with another value at `field` or `rows.field`; `...` takes the field out."""
    tree = json.loads(lock_bytes(LOCK))
    *above, last = where.split(".")
    place = tree["rows"][0] if above else tree
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(tree).encode()


def refused(data: bytes) -> IntegrityError:
    with pytest.raises(IntegrityError) as caught:
        read_lock(data)
    assert caught.value.exit_code == 13 and "cachepipe lock" in str(caught.value.hint)
    return caught.value


@pytest.mark.parametrize("data", [b"", b"not json", b"[]", b'{"format":1}', b"\xff\xfe"])
def test_what_is_no_lock_file_says_how_to_write_one(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1, -1, 999])
def test_a_lock_file_of_another_format_is_refused_with_both_numbers(number: int) -> None:
    assert f"wanted {FORMAT}, found {number}" in str(refused(changed("format", number)))


def test_the_smallest_and_the_largest_numbers_are_read() -> None:
    for size_bytes, packs_bytes in ((1, 0), (LIMITS.statement_bytes, 2**53)):
        lock = replace(LOCK, version=1, rows=(replace(ROW, size_bytes=size_bytes, packs_bytes=packs_bytes),))
        assert read_lock(lock_bytes(lock)) == lock


def test_what_was_read_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        read_lock(lock_bytes(LOCK)).version = 7  # type: ignore[misc]


def test_a_lock_file_comes_back_as_it_was_in_any_spacing() -> None:
    assert b'"format":1,' in lock_bytes(LOCK)
    assert read_lock(lock_bytes(LOCK)) == LOCK
    assert read_lock(json.dumps(json.loads(lock_bytes(LOCK)), indent=4).encode()) == LOCK


def test_what_earlier_releases_wrote_is_read() -> None:
    """Without a root; of a channel that holds nothing; of several targets."""
    assert read_lock(changed("root", ...)) == replace(LOCK, root="")
    several = (ROW, replace(ROW, artifact="01JC0000000000000000000001", statement="b" * 64, device="cuda"))
    for lock in (replace(LOCK, rows=()), replace(LOCK, rows=several)):
        assert read_lock(lock_bytes(lock)) == lock


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        ("name", "../../etc", "not a release name: '../../etc'"),
        ("name", "", "not a release name"),
        ("name", "Demo", "not a release name"),
        ("channel", "stable/..", "not a channel"),
        ("channel", "", "not a channel"),
        ("version", 0, "version 0, wanted 1 or more"),
        ("version", -1, "version -1"),
        ("version", True, "wrong type"),
        ("version", "42", "wrong type"),
        ("version", 42.0, "wrong type"),
        ("version", 2**53 + 1, "beyond 2**53"),
        ("root", "cache/demo", "root is not an absolute path"),
        ("root", "/var/../../etc", "root is not an absolute path"),
        ("root", None, "wrong type"),
        ("rows", {}, "not a list"),
        ("rows", None, "not a list"),
        ("surplus", 1, "unknown field `surplus`"),
        ("revoked", [], "unknown field `revoked`"),
        ("name", ..., "field `name` is missing"),
        ("rows", ..., "field `rows` is missing"),
        ("rows.artifact", "../x", "rows[0]: not an artifact id: '../x'"),
        ("rows.artifact", ROW.artifact.lower(), "not an artifact id"),
        ("rows.statement", "A" * 64, "rows[0]: not a statement digest"),
        ("rows.statement", "a" * 63, "not a statement digest"),
        ("rows.statement", "a" * 63 + "\n", "not a statement digest"),
        ("rows.size_bytes", 0, "size_bytes 0"),
        ("rows.size_bytes", LIMITS.statement_bytes + 1, "size_bytes 262145, wanted 1..262144"),
        ("rows.packs_bytes", -1, "packs_bytes -1"),
        ("rows.created_at", "yesterday", "not a time"),
        ("rows.created_at", "2026-11-30T10:00:00+00:00", "not a time"),
        ("rows.fingerprint", [{"name": "torch", "value": "1"}] * 2, "a part is given twice"),
        ("rows.fingerprint", [{"name": "torch"}], "field `value` is missing"),
        ("rows.surplus", 1, "unknown field `surplus`"),
        ("rows.device", None, "wrong type"),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_name(where: str, value: Any, told: str) -> None:
    assert told in str(refused(changed(where, value)))


def test_a_key_that_is_given_twice_is_refused() -> None:
    data = lock_bytes(LOCK).replace(b'"name":"text-encoder"', b'"name":"text-encoder","name":"other"')
    assert "a key is given twice" in str(refused(data))


def test_a_statement_that_is_pinned_twice_is_refused() -> None:
    twice = replace(LOCK, rows=(ROW, replace(ROW, device="cuda")))
    assert "a statement is pinned twice" in str(refused(lock_bytes(twice)))


def test_a_lock_file_that_is_too_long_is_refused_unread() -> None:
    assert "too long" in str(refused(lock_bytes(LOCK) + b" " * LIMITS.index_bytes))


def test_all_problems_are_told_at_once_and_of_thousands_the_first() -> None:
    wrong = replace(LOCK, name="-", version=0, rows=(replace(ROW, statement="x", size_bytes=-1),))
    text = str(refused(lock_bytes(wrong)))
    assert all(part in text for part in ("not a release name", "version 0", "not a statement digest", "size_bytes -1"))
    many = replace(LOCK, rows=tuple(replace(ROW, statement=f"{n}") for n in range(500)))
    text = str(refused(lock_bytes(many)))
    assert "and 490 more" in text and len(text) < 2000
    for count in (9, 10):
        few = str(refused(lock_bytes(replace(many, rows=many.rows[:count]))))
        assert few.count("not a statement digest") == count and "more" not in few
    assert "; and 1 more" in str(refused(lock_bytes(replace(many, rows=many.rows[:11]))))


@pytest.mark.parametrize("where", ["name", "channel", "root", "rows.artifact", "rows.statement"])
def test_of_a_long_text_eighty_characters_are_told(where: str) -> None:
    text = str(refused(changed(where, "?" * 500)))
    assert "?" * 80 in text and "?" * 81 not in text


@given(st.data())
def test_a_changed_byte_is_read_as_a_whole_lock_file_or_refused(data: st.DataObject) -> None:
    """What is accepted pins by digest: a changed one names a statement that is not there."""
    whole = bytearray(lock_bytes(LOCK))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        lock = read_lock(bytes(whole))
    except IntegrityError:
        return
    assert lock_bytes(read_lock(lock_bytes(lock))) == lock_bytes(lock)
