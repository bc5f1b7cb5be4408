from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from cachepipe.domain.marker import FORMAT, MarkedFile, Marker, marker_bytes, read_marker
from cachepipe.errors import IntegrityError

MARKER = Marker(
    format=FORMAT,
    names=("demo",),
    statements=("a" * 64,),
    root="/var/cache/cachepipe/demo",
    host="h",
    channel="stable",
    index_version=3,
    expires_at="2026-12-14T10:00:00Z",
    trust="signed",
    policy="none",
    bytes=12,
    variables={"TORCHINDUCTOR_VEC_ISA_OK": "1"},
    cpu_isa="avx2",
    has_compiler_stub=True,
    files=(MarkedFile("inductor/a", 3, 1_796_000_000_123_456_789, 2**63, "b" * 64),),
    index_created_at="2026-11-30T10:00:00Z",
    index_ends_at="2026-12-14T10:00:00Z",
)


def tree_of(marker: Marker) -> dict[str, Any]:
    """Returns a marker as it was written before markers were sealed."""
    tree: dict[str, Any] = json.loads(marker_bytes(marker))
    del tree["seal"]
    return tree


def test_a_marker_comes_back_as_it_was() -> None:
    assert read_marker(marker_bytes(MARKER)) == MARKER
    assert marker_bytes(read_marker(marker_bytes(MARKER))) == marker_bytes(MARKER)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 2),
        ("format", None),
        ("files", None),
        ("files", [["a", 1, "1", "1"]]),
        ("files", [["a", "1", "1", "1", "b"]]),
        ("files", [["a", 1, "x", "1", "b"]]),
        ("files", [None]),
        ("names", "demo"),
        ("surplus", 1),
    ],
)
def test_a_marker_of_another_form_is_refused(field: str, value: Any) -> None:
    tree = {**tree_of(MARKER), field: value}
    with pytest.raises(IntegrityError):
        read_marker(json.dumps(tree).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b'{"format":1}'])
def test_a_cut_marker_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_marker(data)


def test_a_marker_of_before_dates_were_kept_is_read() -> None:
    tree = tree_of(MARKER)
    del tree["index_created_at"], tree["index_ends_at"]
    old = read_marker(json.dumps(tree).encode())
    assert old == replace(MARKER, index_created_at="", index_ends_at="")
    assert old.age_warning(datetime(2026, 12, 13, tzinfo=timezone.utc)) == ""


def test_a_marker_of_before_it_was_sealed_is_read_and_sealed_when_it_is_written_anew() -> None:
    old = read_marker(json.dumps(tree_of(MARKER)).encode())
    assert old == MARKER
    assert json.loads(marker_bytes(old))["seal"] == json.loads(marker_bytes(MARKER))["seal"] != ""


@pytest.mark.parametrize("seal", ["", "0" * 64, 7, None, [], "\ud800", '"'])
def test_a_marker_with_another_seal_is_refused(seal: Any) -> None:
    with pytest.raises(IntegrityError, match="marker"):
        read_marker(json.dumps({**tree_of(MARKER), "seal": seal}).encode())


def test_a_file_may_have_a_name_that_looks_like_a_seal() -> None:
    odd = replace(MARKER, files=(MarkedFile('inductor/"seal":""', 3, 4, 5, "b" * 64), *MARKER.files))
    assert read_marker(marker_bytes(odd)) == odd


def test_from_the_middle_of_the_life_of_its_index_on_a_marker_warns() -> None:
    half = datetime(2026, 12, 7, 10, tzinfo=timezone.utc)
    assert MARKER.age_warning(half - timedelta(seconds=1)) == ""
    assert MARKER.age_warning(half).startswith("demo@stable:3 expires at 2026-12-14T10:00:00Z: more than half")


@pytest.mark.parametrize("field", ["index_created_at", "index_ends_at"])
def test_a_date_that_is_none_is_damage(field: str) -> None:
    harmed = replace(MARKER, **{field: "soon"})
    with pytest.raises(IntegrityError):
        harmed.age_warning(datetime(2026, 12, 7, tzinfo=timezone.utc))
