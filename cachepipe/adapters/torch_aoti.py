"""Loads a shared object that AOTInductor made, without torch._dynamo and torch._inductor: a service's start.

Source: torch/csrc/inductor/aoti_runner/pybind.cpp, torch/csrc/inductor/aoti_runtime/model_container.h, torch/utils/_pytree.py; read in torch
2.11.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._C import _aoti
from torch.utils import _pytree as pytree

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def load_native(path: str, device: torch.device, instances: int = 1) -> Run:
    """Returns the function in a shared object: tensors → tensors, on a GPU in the current stream.

    Args:
        path: of the shared object, the kernels in it.
        device: of the tensors.
        instances: calls that may be under way on a GPU; a further one waits there until the first of them is done.

    Raises:
        RuntimeError: it cannot be loaded.
    """
    if device.type == "cpu":
        return cast(Run, _aoti.AOTIModelContainerRunnerCpu(path, 1).run)
    with torch.cuda.device(device):  # loading leaves it as the current one
        return cast(Run, _aoti.AOTIModelContainerRunnerCuda(path, instances, str(device)).run)


def unflattener(output: str, leaves: Sequence[Any]) -> Callable[[list[torch.Tensor]], Any]:
    """Returns what nests a function's tensors as the model's own outputs nest.

    Args:
        output: pytree's text; empty: one tensor.
        leaves: number of a tensor, or `["const", value]`.

    Raises:
        Exception: a class of the outputs is not known to pytree in this process.
    """
    if not output:
        return lambda tensors: tensors[0]
    spec = pytree.treespec_loads(output)
    if list(leaves) == list(range(len(leaves))):
        return lambda tensors: pytree.tree_unflatten(tensors, spec)

    def unflatten(tensors: list[torch.Tensor]) -> Any:
        found = [tensors[leaf] if isinstance(leaf, int) else leaf[1] for leaf in leaves]
        return pytree.tree_unflatten(found, spec)

    return unflatten
