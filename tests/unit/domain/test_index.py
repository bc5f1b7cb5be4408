"""An index by itself: its versions, its times, its rows, and which of them a machine takes."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta, timezone

import pytest

from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.index import (
    FORMAT,
    LIFETIME,
    Index,
    IndexRow,
    advance,
    age_warning,
    first_index,
    index_bytes,
    nothing_current,
    parse_timestamp,
    read_index,
    select,
    timestamp,
    with_row,
)
from cachepipe.domain.limits import LIMITS
from cachepipe.errors import FingerprintMismatchError, IntegrityError, MissError, TrustError
from tests.support.artifacts import CPU_PARTS, CUDA_PARTS, NOW, fingerprint_of, parts_of

MACHINE = fingerprint_of(CPU_PARTS)
TEXT = "2026-11-30T10:00:00Z"


def row(name: str, created_at: str = TEXT, device: str = "cpu", **parts: str) -> IndexRow:
    """Returns a row whose artifact and statement begin with `name`."""
    facts = CPU_PARTS if device == "cpu" else CUDA_PARTS
    return IndexRow(name * 26, name * 64, 7, 9, device, parts_of(facts, **parts), created_at)


INDEX = Index(FORMAT, "demo", "stable", 3, TEXT, timestamp(NOW + LIFETIME), "n", (row("a"),), ("b" * 64,))

# --- times ---------------------------------------------------------------------------------------------------------------


def test_a_time_is_told_in_utc_and_whole_seconds() -> None:
    east = datetime(2026, 11, 30, 12, 0, 0, 999, tzinfo=timezone(timedelta(hours=2)))
    assert timestamp(east) == TEXT
    assert parse_timestamp(TEXT, "x") == NOW


@pytest.mark.parametrize(
    "text", ["", "soon", TEXT[:-1], TEXT + "Z", TEXT[:-1] + "+00:00", TEXT[:10], "2026-13-01T10:00:00Z"]
)
def test_a_time_in_another_form_is_refused_by_name(text: str) -> None:
    with pytest.raises(IntegrityError, match="marker: not a time") as caught:
        parse_timestamp(text, "marker")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["x" * 50, "2026-11-30T10:00:00+00:00:00.0000000000000000000000000000"])
def test_what_is_no_time_is_not_told_at_length(text: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        parse_timestamp(text, "marker")
    assert repr(text[:40]) in str(caught.value) and text[:41] not in str(caught.value)


def test_a_long_time_in_another_form_is_not_told_at_length() -> None:
    text = "2026-11-30T10:00:00" + "Z" * 40
    with pytest.raises(IntegrityError) as caught:
        parse_timestamp(text, "marker")
    assert text[:41] not in str(caught.value)


def test_a_warning_comes_in_the_middle_of_an_index_life_and_not_before() -> None:
    ends = timestamp(NOW + timedelta(days=10))
    middle = NOW + timedelta(days=5)
    assert age_warning("demo@stable:3", TEXT, ends, middle - timedelta(seconds=1)) == ""
    text = f"demo@stable:3 expires at {ends}: more than half of its life is over, renew it (`cachepipe renew`)"
    assert [age_warning("demo@stable:3", TEXT, ends, now) for now in (middle, middle + LIFETIME)] == [text, text]


@pytest.mark.parametrize("dates", [("soon", TEXT), (TEXT, "soon")])
def test_an_age_without_its_dates_is_refused_by_the_label(dates: tuple[str, str]) -> None:
    with pytest.raises(IntegrityError, match="demo@stable:3"):
        age_warning("demo@stable:3", *dates, NOW)


# --- versions ------------------------------------------------------------------------------------------------------------


def test_the_first_version_lives_a_fortnight() -> None:
    found = first_index("demo", "stable", (row("a"),), NOW, "n")
    assert found == Index(1, "demo", "stable", 1, TEXT, "2026-12-14T10:00:00Z", "n", (row("a"),), ())


def test_the_next_version_has_its_own_rows_times_and_nonce_and_the_same_revocations() -> None:
    later = NOW + timedelta(days=1)
    found = advance(INDEX, (row("c"),), later, "m")
    dates = ("2026-12-01T10:00:00Z", "2026-12-15T10:00:00Z")
    assert found == Index(1, "demo", "stable", 4, *dates, "m", (row("c"),), ("b" * 64,))


def test_an_index_comes_back_as_it_was() -> None:
    assert read_index(index_bytes(INDEX), "demo", "stable", 3) == INDEX


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"format": 2},
        {"name": "a"},
        {"name": "z"},
        {"channel": "a"},
        {"channel": "z"},
        {"version": 2},
        {"version": 4},
    ],
    ids=str,
)
def test_another_index_than_the_one_that_was_asked_for_is_refused(change: dict[str, object]) -> None:
    other = dataclasses.replace(INDEX, **change)  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match="index: not the one asked for") as caught:
        read_index(index_bytes(other), "demo", "stable", 3)
    wanted = (FORMAT, "demo", "stable", 3)
    assert f"wanted {wanted}" in str(caught.value)
    assert f"found {(other.format, other.name, other.channel, other.version)}" in str(caught.value)


def test_an_index_of_the_greatest_length_is_read_and_a_longer_one_is_not() -> None:
    data = index_bytes(INDEX)
    assert read_index(data, "demo", "stable", 3, dataclasses.replace(LIMITS, index_bytes=len(data))) == INDEX
    with pytest.raises(IntegrityError, match="index demo@stable:3: too long"):
        read_index(data, "demo", "stable", 3, dataclasses.replace(LIMITS, index_bytes=len(data) - 1))


# --- rows ----------------------------------------------------------------------------------------------------------------


def test_a_row_takes_the_place_of_its_target_alone() -> None:
    gpu, other = row("g", device="cuda"), row("o", threads="4")
    assert with_row((row("a"), gpu, other), row("b")) == (gpu, other, row("b"))
    assert with_row((), row("b")) == (row("b"),)


@pytest.mark.parametrize(("first", "second"), [("580.65.06", "590.10"), ("590.10", "580.65.06")])
def test_rows_of_two_drivers_stay_beside_each_other(first: str, second: str) -> None:
    one, two = row("a", device="cuda", driver=first), row("b", device="cuda", driver=second)
    assert with_row((one,), two) == (one, two)


def test_equal_parts_on_another_device_are_another_target() -> None:
    cpu, cuda = row("a"), dataclasses.replace(row("b"), device="cuda")
    assert with_row((cpu,), cuda) == (cpu, cuda)
    assert with_row((cuda,), cpu) == (cuda, cpu)


def test_a_row_that_was_read_is_the_same_target_as_one_that_was_made() -> None:
    (old,) = read_index(index_bytes(INDEX), "demo", "stable", 3).rows
    assert with_row((old,), row("b")) == (row("b"),)


def test_what_was_verified_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        INDEX.version = 4  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        INDEX.rows[0].statement = ""  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ((row("a"), row("b", "2026-11-30T10:00:01Z")), "b"),
        ((row("b", "2026-11-30T10:00:01Z"), row("a", "2026-11-30T10:00:02Z")), "a"),
        ((row("a"), row("b")), "b"),
        ((row("b"), row("a")), "b"),
        ((row("a"), row("b", threads="4")), "a"),
        ((row("a"), row("g", device="cuda")), "a"),
    ],
)
def test_the_newest_row_that_fits_is_taken(rows: tuple[IndexRow, ...], wanted: str) -> None:
    assert select(rows, MACHINE, "demo@stable") == row(
        wanted, next(r.created_at for r in rows if r.artifact[0] == wanted)
    )


def test_a_revoked_row_is_passed_over() -> None:
    rows = (row("a"), row("b", "2026-11-30T10:00:01Z"))
    assert select(rows, MACHINE, "demo@stable", ["b" * 64]) == rows[0]


def test_when_all_rows_are_revoked_they_are_named_with_what_to_do() -> None:
    with pytest.raises(TrustError) as caught:
        select((row("a"), row("b")), MACHINE, "demo@stable", ["a" * 64, "b" * 64])
    names = f"{'a' * 26} ({'a' * 12}), {'b' * 26} ({'b' * 12})"
    assert str(caught.value) == f"revoked: demo@stable: {names}"
    assert caught.value.hint == "build and publish it anew, or roll the channel back"


def test_without_rows_nothing_is_published() -> None:
    with pytest.raises(MissError) as caught:
        select((), MACHINE, "demo@stable")
    assert str(caught.value) == "nothing is published: demo@stable"
    with pytest.raises(MissError, match="all of it was revoked"):
        select((), MACHINE, "demo@stable", ["a" * 64])


@pytest.mark.parametrize(("count", "end"), [(1, ""), (3, ""), (4, ", …"), (9, ", …")])
def test_what_an_empty_index_revokes_is_why_and_is_told_in_short(count: int, end: str) -> None:
    digests = [f"{number}" * 64 for number in range(count)]
    error = nothing_current("demo@stable", digests)
    told = ", ".join(digest[:12] for digest in digests[:3]) + end
    assert str(error) == f"nothing is published: demo@stable: all of it was revoked ({told})"
    assert error.hint == "build and publish it anew, or roll the channel back"


@pytest.mark.parametrize("is_turned", [False, True])
def test_when_none_fits_the_nearest_row_tells_what_differs(is_turned: bool) -> None:
    rows = (row("a", threads="4", compiler="g++ 9"), row("b", threads="8"), row("g", device="cuda"))
    with pytest.raises(FingerprintMismatchError) as caught:
        select(rows[::-1] if is_turned else rows, Fingerprint(parts_of(CPU_PARTS)), "demo@stable")
    assert "threads 8 to 2" in str(caught.value) and "compiler" not in str(caught.value)
