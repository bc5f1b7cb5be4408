"""Whether compiled and eager gave the same outputs; what cannot be compared is a problem, never a success; digests of outputs."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

LARGEST_DIFF = 1e300
"""Stands for an infinite difference: evidence holds finite numbers only."""


class Comparison(NamedTuple):
    """The verdict on all outputs of one call."""

    max_abs_diff: float
    """Over the elements that are not equal; 0 where both are the same infinity or both NaN."""
    is_close: bool
    problems: tuple[str, ...]
    """What made outputs incomparable, in words."""


def compare_outputs(
    found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], rtol: float, atol: float
) -> Comparison:
    """Returns how far compiled outputs are from eager ones.

    Args:
        found: of the compiled function.
        wanted: of eager, in the same order.
        rtol, atol: as of `torch.allclose`, for floating and complex outputs; integers (mostly indices) must be equal.
    """
    if not found and not wanted:
        return Comparison(0.0, False, ("no output is a tensor or a number: nothing can be compared with eager",))
    if len(found) != len(wanted):
        return Comparison(LARGEST_DIFF, False, (f"{len(found)} outputs, eager gives {len(wanted)}",))
    worst, is_close, problems = 0.0, True, []
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            problems.append(f"output {number}: {_kind(one)}, eager gives {_kind(other)}")
            worst, is_close = LARGEST_DIFF, False
            continue
        if _is_nan_throughout(other):
            problems.append(f"output {number}: eager gives NaN throughout for the example inputs: it proves nothing")
        difference, is_near = _difference(one, other, rtol, atol)
        worst, is_close = max(worst, difference), is_close and is_near
    return Comparison(worst, is_close, tuple(problems))


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _is_nan_throughout(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and bool(tensor.isnan().all())


def _difference(one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float) -> tuple[float, bool]:
    import torch

    is_exact = not (one.is_floating_point() or one.is_complex())
    if is_exact:
        is_near = torch.equal(one, other)
    if one.is_complex():
        one, other = (torch.view_as_real(tensor.resolve_conj()) for tensor in (one, other))
    left, right = one.double().cpu(), other.double().cpu()
    if not is_exact:
        is_near = torch.allclose(left, right, rtol=rtol, atol=atol, equal_nan=True)
    is_same = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs().nan_to_num(nan=float("inf")).masked_fill(is_same, 0.0)
    return min(float(apart.max()), LARGEST_DIFF) if apart.numel() else 0.0, is_near


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    """Returns one SHA-256 over the bytes, shapes and dtypes of tensors."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        # read in place: a service's environment need not have numpy, through which torch would copy
        whole.update(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))
    return whole.hexdigest()
