"""A module whose forward reads everything that a guard of torch.compile looks at, for the engine `aot`."""

from __future__ import annotations

import time
import types
from typing import Any

import torch
from torch import Tensor, nn

SCALE = 2.0
TABLE = {"offset": 0.5}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE + TABLE["offset"]


def passed_through(function: Any, power: int = 2) -> Any:
    def wrapper(self: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = function(self, x) ** power
        return result

    return wrapper


class Config:
    def __init__(self) -> None:
        self.gain = 3.0
        self.flags = {"relu": True}


class Inner(nn.Module):
    bias = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    @passed_through
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x) + self.shift + self.bias
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.inner = Inner()
        self.dropout = nn.Dropout(0.5)
        self.mask = torch.ones(8)
        self.times = 2
        self.steps = [1, 2]
        self.sizes = (8, 8)
        self.origin = hash("as transformers keeps one of a configuration: another in every process")

    def forward(self, x: Tensor, extra: dict[str, Any], double: bool = False) -> dict[str, Any]:
        """Returns nested outputs for x (batch, 8) and `{"bias": (8,), "pair": [(batch, 8), 2]}`."""
        y = self.second(self.first(x) * self.times) * self.config.gain * self.mask
        if self.config.flags["relu"]:
            y = y.relu()
        y = self.dropout(y) + extra["bias"] + extra["pair"][0] * extra["pair"][1]
        for step in self.steps:
            y = y + step
        y = self.inner(scaled(y)) + torch.tensor(0.125)
        return {"y": y.double() if double else y, "more": (y.sum(-1), None, self.sizes[0])}


def model() -> nn.Module:
    return Model()


def tripled() -> nn.Module:
    """Returns a module in which a value that the forward reads differs."""
    made = Model()
    made.times = 3
    return made


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x + self.total


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Returning(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


class Branching(nn.Module):
    """Reads a time, which only one branch in a thousand depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.started = time.time()

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.started < 4e9 else x * 3


class Keeping(Branching):
    """Reads a time in its first call, and keeps what follows from it where no description looks."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = types.SimpleNamespace(scale=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.kept.scale is None:
            self.kept.scale = 2 if self.started < 4e9 else 3
        result: Tensor = x * self.kept.scale
        return result


class Settling(Drawing):
    """Its first call leaves a value behind, and later ones do not change it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls or 1
        return super().forward(x)


def branching() -> nn.Module:
    return Branching()


def keeping() -> nn.Module:
    return Keeping()


def settling() -> nn.Module:
    return Settling()


def drawing() -> nn.Module:
    return Drawing()


def counting() -> nn.Module:
    return Counting()


def writing() -> nn.Module:
    return Writing()


def hooked() -> nn.Module:
    return Hooked()


def returning() -> nn.Module:
    return Returning()


def function() -> Any:
    return torch.relu
