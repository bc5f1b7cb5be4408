"""What cannot be compared is never called equal, and what is equal is never called different."""

from __future__ import annotations

import math

import pytest
import torch

from cachepipe.adapters.torch_compare import LARGEST_DIFF, compare_outputs

NAN, INF = math.nan, math.inf


def of(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_no_outputs_at_all_are_not_agreement() -> None:
    verdict = compare_outputs([], [], 0.1, 0.1)
    assert not verdict.is_close and "nothing can be compared" in verdict.problems[0]


def test_equal_infinities_and_nan_at_equal_places_are_no_difference() -> None:
    verdict = compare_outputs([of(-INF, NAN, 1.0)], [of(-INF, NAN, 1.0)], 0.0, 0.0)
    assert verdict == (0.0, True, ())


@pytest.mark.parametrize("other", [of(1.0, NAN), of(INF, 1.0), of(-INF, NAN)])
def test_nan_or_infinity_on_one_side_is_an_endless_difference(other: torch.Tensor) -> None:
    verdict = compare_outputs([of(1.0, 1.0)], [other], 0.5, 0.5)
    assert not verdict.is_close and verdict.max_abs_diff == LARGEST_DIFF


def test_outputs_that_are_nan_throughout_in_eager_prove_nothing() -> None:
    verdict = compare_outputs([of(NAN, NAN)], [of(NAN, NAN)], 0.1, 0.1)
    assert "NaN throughout" in verdict.problems[0]


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        ([of(1.0), of(1.0)], [of(1.0)], "2 outputs, eager gives 1"),
        ([of(1.0, 1.0)], [of(1.0)], "output 0: float32 (2,), eager gives float32 (1,)"),
        ([of(1.0, dtype=torch.float64)], [of(1.0)], "output 0: float64 (1,), eager gives float32 (1,)"),
    ],
)
def test_another_number_shape_or_dtype_of_outputs_is_named_and_never_a_difference_of_zero(
    found: list[torch.Tensor], wanted: list[torch.Tensor], words: str
) -> None:
    verdict = compare_outputs(found, wanted, 1.0, 1.0)
    assert verdict.problems == (words,) and not verdict.is_close and verdict.max_abs_diff == LARGEST_DIFF


def test_an_index_within_the_tolerance_is_still_another_index() -> None:
    verdict = compare_outputs([torch.tensor([30100])], [torch.tensor([30000])], 0.02, 0.02)
    assert not verdict.is_close and verdict.max_abs_diff == 100.0


def test_the_imaginary_part_counts() -> None:
    assert not compare_outputs([torch.tensor([1 + 2j])], [torch.tensor([1 + 3j])], 0.0, 0.5).is_close
    assert compare_outputs([torch.tensor([1 + 2j])], [torch.tensor([1 + 2j])], 0.0, 0.0) == (0.0, True, ())


def test_an_empty_output_is_equal_to_an_empty_one() -> None:
    assert compare_outputs([torch.empty(0, 4)], [torch.empty(0, 4)], 0.0, 0.0) == (0.0, True, ())
