"""Loads a shared object that AOTInductor made, without torch._dynamo and torch._inductor: a service's start.

Source: torch/csrc/inductor/aoti_runner/pybind.cpp, torch/csrc/inductor/aoti_runtime/model_container.h, torch/_inductor/output_code.py
(`CompiledAOTI`), torch/utils/_pytree.py; read in torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._C import _aoti
from torch.utils import _pytree as pytree

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def load_native(path: str, device: torch.device) -> Run:
    """Returns the function in a shared object: tensors → tensors; on a GPU in the current stream, for one thread at a time.

    There it is torch's variant for one thread: the other one asks by events whether earlier calls are done, and waits for them.

    Args:
        path: of the shared object, the kernels in it.
        device: of the tensors.

    Raises:
        RuntimeError: it cannot be loaded.
    """
    if device.type == "cpu":
        return cast(Run, _aoti.AOTIModelContainerRunnerCpu(path, 1).run)
    with torch.cuda.device(device):  # loading leaves it as the current one
        make: Any = _aoti.AOTIModelContainerRunnerCuda  # torch's own stub does not know the fifth argument
        return cast(Run, make(path, 1, str(device), "", True).run)


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
