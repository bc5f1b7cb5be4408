"""Coverage: what is in the artifact, answered from the spec alone."""

from __future__ import annotations

import pytest

from cachepipe.domain.entry import DynamicDim, bucket_label, is_covered, traced_bucket
from tests.support.jobs import spec_of

STATIC = spec_of("small", ({"batch": 1, "seq": 128}, {"batch": 8, "seq": 128}, {"batch": 8, "seq": 512}))
DYNAMIC = spec_of(
    "small",
    ({"batch": 1, "seq": 128}, {"batch": 8, "seq": 128}),
    dynamic_dims={"batch": DynamicDim(2, 64)},
)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ({"batch": 8, "seq": 512}, True),
        ({"batch": 1, "seq": 512}, False),
        ({"batch": 3, "seq": 128}, False),
        ({"seq": 512}, True),
        ({"seq": 77}, False),
        ({"layers": 3}, False),
    ],
)
def test_case_f12_static_coverage_answers_for_any_sizes(dims: dict[str, int], expected: bool) -> None:
    assert is_covered(STATIC, dims) is expected


@pytest.mark.parametrize(("batch", "expected"), [(1, True), (2, True), (7, True), (64, True), (65, False)])
def test_case_f12_a_dynamic_dimension_covers_its_bounds_and_the_size_one_bucket(batch: int, expected: bool) -> None:
    assert is_covered(DYNAMIC, {"batch": batch, "seq": 128}) is expected


def test_shape_buckets_of_one_dynamic_graph_are_traced_alike() -> None:
    assert traced_bucket(DYNAMIC, {"batch": 8, "seq": 128}) == traced_bucket(DYNAMIC, {"batch": 9, "seq": 128})
    assert traced_bucket(DYNAMIC, {"batch": 1, "seq": 128}) != traced_bucket(DYNAMIC, {"batch": 2, "seq": 128})


def test_labels_are_readable() -> None:
    assert bucket_label({"batch": 8, "seq": 128}) == "batch=8,seq=128"
    assert bucket_label({}) == "-"
