"""Names of artifacts sort by age and hold their randomness."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain.ulid import is_ulid, ulid
from tests.support.artifacts import NOW

ten_bytes = st.binary(min_size=10, max_size=10)


@given(st.integers(1, 10**11), ten_bytes, ten_bytes)
def test_later_names_sort_after_earlier_ones(later_ms: int, one: bytes, other: bytes) -> None:
    early, late = ulid(NOW, one), ulid(NOW + timedelta(milliseconds=later_ms), other)
    assert early < late
    assert is_ulid(early)
    assert is_ulid(late)


@given(ten_bytes, ten_bytes)
def test_other_randomness_gives_another_name(one: bytes, other: bytes) -> None:
    assert (ulid(NOW, one) == ulid(NOW, other)) == (one == other)


def test_the_form_is_that_of_the_specification() -> None:
    example = datetime(2016, 7, 30, 22, 36, 16, 385_000, tzinfo=timezone.utc)
    assert ulid(example, bytes(10)) == "01ARYZ6S41" + "0" * 16
    assert ulid(example, b"\xff" * 10) == "01ARYZ6S41" + "Z" * 16


@pytest.mark.parametrize(
    "text", ["", "../x", "01KB9WZDG0000000000000000", "8" * 26, "01kb9wzdg00000000000000000", "I" * 26]
)
def test_other_texts_are_no_names(text: str) -> None:
    assert not is_ulid(text)


def test_a_wrong_number_of_random_bytes_is_a_bug() -> None:
    with pytest.raises(ValueError, match="ten"):
        ulid(NOW, b"")
