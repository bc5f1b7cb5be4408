"""One process that calls a small module in many ways, each a row of the matrix of what torch's keys depend on.

usage: key_matrix.py CACHE_FOLDER ROWS.json [base]
With `base` it calls once, as the builder, else every row of `ROWS`; it writes row → evidence (a JSON tree).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import nn

from cachepipe.adapters.torch_settings import ambient_settings, config_components, set_matmul_precision
from cachepipe.domain.evidence import EntryEvidence, Work
from cachepipe.domain.record import to_json
from cachepipe.runtime.recorder import Recorder


class Net(nn.Module):
    """Its kernels are torch.mm alone, so that nothing has to be built by a C++ compiler."""

    def __init__(self, name: str = "encoder") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        setattr(self, name, nn.Linear(8, 8, bias=False))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = getattr(self, self.name)(x)
        return y if scale is None else torch.mm(y, scale)


class Positions(Net):
    """Makes a tensor, so that the default device is part of its graph."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(super().forward(x), torch.empty(8, 8).fill_(1.0))


@contextmanager
def swapped(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def matmul(name: str, value: bool) -> AbstractContextManager[None]:
    owner = torch.backends.cuda.matmul
    return swapped(lambda: getattr(owner, name), lambda found: setattr(owner, name, found), value)


@contextmanager
def precision(told: Callable[[], None]) -> Iterator[None]:
    """What torch is told of precision, ended as a calling context of ours ends it."""
    put_back = set_matmul_precision("highest")
    told()
    try:
        yield
    finally:
        put_back()


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def through_closure(net: nn.Module, **settings: Any) -> Callable[..., Any]:
    return torch.compile(lambda x: net(x), **settings)  # noqa: PLW0108 - the function around it is the point


def as_argument(net: nn.Module, **settings: Any) -> Callable[..., Any]:
    compiled = torch.compile(lambda model, x: model(x), **settings)
    return lambda x: compiled(net, x)


def called(row: dict[str, Any]) -> EntryEvidence:
    """Returns the evidence of one call under no_grad, with what the row changes."""
    torch._dynamo.reset()
    net = row.get("net", lambda: Net().eval())()
    compiled = row.get("wrap", torch.compile)(net, dynamic=row.get("dynamic", False), **row.get("compile", {}))
    x = row.get("x", torch.ones(4, 8))
    recorder = Recorder(with_components=True)
    recorder.start()
    try:
        with ExitStack() as stack, recorder.shape_bucket(row.get("label", "batch=4")):
            stack.enter_context(torch.no_grad())
            for context in row.get("contexts", ()):
                stack.enter_context(context)
            settings, configs = ambient_settings("cpu"), config_components()
            compiled(x, **row.get("kwargs", {}))
    finally:
        recorder.stop()
    return EntryEvidence(
        entry="net",
        step="verify",
        torch_version=torch.__version__,
        shape_buckets=(),
        lookups=tuple(recorder.lookups),
        work=Work(),
        tuned_kernels=(),
        import_s=0.0,
        build_s=0.0,
        ready_s=0.0,
        settings=settings,
        components={**recorder.components, **configs},
    )


def rows() -> dict[str, dict[str, Any]]:
    bf16 = torch.bfloat16
    set_device = swapped(lambda: None, torch.set_default_device, "cpu")
    deterministic = swapped(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)
    default_dtype = swapped(torch.get_default_dtype, torch.set_default_dtype, torch.float64)
    threads = swapped(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1)
    return {
        "same": {},
        "inference_mode": {"contexts": [torch.inference_mode()]},
        "attribute renamed": {"net": lambda: Net("enc").eval()},
        "net passed as argument": {"wrap": as_argument},
        "closure wrapper": {"wrap": through_closure},
        "requires_grad": {"net": lambda: Net().eval().requires_grad_(False)},
        "grad mode": {"contexts": [torch.enable_grad()]},
        "requires_grad, grad mode": {
            "net": lambda: Net().eval().requires_grad_(False),
            "contexts": [torch.enable_grad()],
        },
        "autocast": {"contexts": [torch.autocast("cpu", bf16)]},
        "positions": {"net": lambda: Positions().eval()},
        "default device": {"net": lambda: Positions().eval(), "contexts": [set_device]},
        "functorch": {"contexts": [functorch.patch(debug_partitioner=True)]},
        "strict cache": {"contexts": [functorch.patch(strict_autograd_cache=not functorch.strict_autograd_cache)]},
        "bundled": {"contexts": [functorch.patch(bundled_autograd_cache=True)]},
        "cxx": {"contexts": [inductor.patch({"cpp.cxx": (None, "/usr/bin/g++")})]},
        "threads": {"contexts": [threads]},
        "key tag": {"contexts": [torch.compiler.config.patch(cache_key_tag="v2")]},
        "size_asserts": {"contexts": [inductor.patch(size_asserts=False)]},
        "debug": {"contexts": [inductor.patch(debug=True)]},
        "optimisation level": {"contexts": [inductor.patch({"cutlass.compile_opt_level": "-O3"})]},
        "hooks": {"contexts": [inductor.patch(generate_intermediate_hooks=True)]},
        "matmul precision": {"contexts": [precision(lambda: torch.set_float32_matmul_precision("high"))]},
        "precision told": {"contexts": [precision(lambda: torch.set_float32_matmul_precision("highest"))]},
        "tf32": {"net": lambda: Positions().eval(), "contexts": [precision(allow_tf32)]},
        "fp16 reduction": {"contexts": [matmul("allow_fp16_reduced_precision_reduction", False)]},
        "bf16 reduction": {"contexts": [matmul("allow_bf16_reduced_precision_reduction", False)]},
        "deterministic": {"contexts": [deterministic]},
        "default dtype": {"contexts": [default_dtype]},
        "reduce-overhead": {"compile": {"mode": "reduce-overhead"}},
        "max-autotune": {"compile": {"mode": "max-autotune"}},
        "max-autotune-no-cudagraphs": {"compile": {"mode": "max-autotune-no-cudagraphs"}},
        "dtype": {"net": lambda: Net().eval().to(bf16), "x": torch.ones(4, 8, dtype=bf16)},
        "batch": {"x": torch.ones(3, 8), "label": "batch=3"},
        "keyword": {"kwargs": {"scale": torch.ones(8, 8)}},
        "dynamic": {"dynamic": True},
        "stride": {"x": torch.ones(8, 4).t()},
        "freezing": {"contexts": [inductor.patch(freezing=True)]},
    }


def main(folder: str, target: str, *words: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    base = {"base": {}, "base positions": {"net": lambda: Positions().eval()}}
    chosen: dict[str, dict[str, Any]] = base if words else rows()
    tree = {name: to_json(called(row)) for name, row in chosen.items()}
    with open(target, "w", encoding="utf-8") as file:
        json.dump(tree, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # torch's pools need not end in order
