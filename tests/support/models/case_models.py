"""Small modules for the field cases. Those named `mm_*` need no C++ compiler, which takes seconds a kernel: torch.mm is an extern
kernel. Those that write into a buffer or their input need one all the same."""

from __future__ import annotations

import gc
import os
import subprocess

import torch
from torch import nn


class Product(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight)


def mm_product(width: int = 8) -> nn.Module:
    return Product(width)


def mm_collected(rarely: bool) -> nn.Module:
    """Fails where the garbage collector does not run as rarely, or as often, as expected."""
    assert (gc.get_threshold()[0] > 10_000) == rarely, gc.get_threshold()
    return Product(8)


class Batches(Product):
    """x: (batch, seq, 8)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight)


def mm_batches() -> nn.Module:
    return Batches()


class Small(nn.Module):
    """Two native kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.gelu(self.first(x))).softmax(-1)


def small() -> nn.Module:
    return Small()


class AsksForSizes(Product):
    """`is_old` asks for a size that `dynamic` bounds do not promise; the graph is the same without the question."""

    is_old = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, self.weight)
        if self.is_old and x.shape[0] > 5:
            pass
        return product


def mm_asks_for_sizes(is_old: bool) -> nn.Module:
    model = AsksForSizes()
    model.is_old = is_old
    return model


class Broken(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, self.weight)
        torch._dynamo.graph_break()
        return torch.mm(y, self.weight)


def mm_graph_break() -> nn.Module:
    return Broken()


class Conditional(Product):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_on", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        return torch.cond(self.is_on, lambda t: torch.mm(t, w), lambda t: torch.mm(t, w.t()), (x,))


def mm_conditional() -> nn.Module:
    return Conditional()


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return torch.mm(gradient, weight.t()), torch.mm(x.t(), gradient)


class WithFunction(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnProduct.apply(x, self.weight)


def mm_autograd_function() -> nn.Module:
    return WithFunction()


def mm_autograd_function_allowed() -> nn.Module:
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    return WithFunction()


class CountsInPython(Product):
    """Traced anew at every call: its guards hold the value of a plain attribute."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            x = torch.mm(x, self.weight)
        return x


def mm_counts_in_python() -> nn.Module:
    return CountsInPython()


def never_compiles_stance() -> nn.Module:
    torch.compiler.set_stance("force_eager")
    return Product()


def never_compiles_disabled() -> nn.Module:
    torch._dynamo.config.disable = True
    return Product()


def never_caches() -> nn.Module:
    import torch._inductor.config as inductor

    inductor.force_disable_caches = True
    return Product()


def hides_errors() -> nn.Module:
    import torch._inductor.config as inductor

    torch._dynamo.config.suppress_errors = True
    inductor.cpp.cxx = ("/nonexistent/g++",)
    return Small()


def raises() -> nn.Module:
    raise RuntimeError("weights are missing")


def ends_the_process() -> nn.Module:
    raise SystemExit("no weights in /data/\udcff")  # a path as `os` gives it when its bytes are no UTF-8


class Hanging(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(3600)
        return x


def hangs() -> nn.Module:
    return Hanging()


class CountsCalls(Product):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.mm(x, self.weight) * self.calls


def mm_counts_calls() -> nn.Module:
    return CountsCalls()


class WritesIntoItsInput(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return torch.mm(x, self.weight)


def mm_writes_into_its_input() -> nn.Module:
    return WritesIntoItsInput()


class Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class GivesOpaque(Product):
    def forward(self, x: torch.Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(torch.mm(x, self.weight))


def mm_opaque() -> nn.Module:
    return GivesOpaque()


def mm_forks() -> nn.Module:
    """The child comes back from the factory as its parent does; `forks` beside HOME tells in which order they did."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    with open(os.path.join(os.environ["HOME"], "forks"), "a", encoding="utf-8") as file:
        file.write("parent\n" if child else "child\n")
    return Product()


class WritesElsewhere(Product):
    """Keeps a cache of its own, as libraries with kernels of their own do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leave_files()
        return torch.mm(x, self.weight)


@torch.compiler.disable
def leave_files() -> None:
    home = os.environ["HOME"]
    os.makedirs(os.path.join(home, ".triton", "cache"), exist_ok=True)
    with open(os.path.join(home, ".triton", "cache", "kernel.json"), "w", encoding="utf-8") as file:
        file.write("{}")
    subprocess.run(
        ["sh", "-c", f"mkdir -p {home}/.nv/ComputeCache/1 && echo cubin > {home}/.nv/ComputeCache/1/k"], check=True
    )
    with open(os.path.join(home, "gone"), "w", encoding="utf-8"):
        pass
    os.unlink(os.path.join(home, "gone"))


def mm_writes_elsewhere() -> nn.Module:
    return WritesElsewhere()
