"""Small modules for the field cases. Those named `mm_*` need no C++ compiler: torch.mm is an extern kernel."""

from __future__ import annotations

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


class Broken(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, self.weight)
        torch._dynamo.graph_break()
        return torch.mm(y, self.weight)


def mm_graph_break() -> nn.Module:
    return Broken()


class Conditional(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))


def conditional() -> nn.Module:
    return Conditional()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * 2


class WithFunction(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Twice.apply(torch.mm(x, self.weight)).sum()


def autograd_function() -> nn.Module:
    return WithFunction()


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


class Hanging(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(3600)
        return x


def hangs() -> nn.Module:
    return Hanging()
