"""Which attributes a call reads, of modules, of objects in them, and of torch's own classes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import nn

from cachepipe.adapters.torch_reads import Reads
from cachepipe.errors import UsageError


@dataclass
class Config:
    seed: int = 1
    width: int = 8


class Model(nn.Module):
    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.config = Config()
        self.token = 3
        self.table = {"key": 4, "module": Config}
        self.size = "hidden"
        self.__dict__["answered"] = 5

    @property
    def answered(self) -> int:
        return 6


CALLS: dict[str, tuple[str, Callable[[Model], Any]]] = {
    "by name": ("self.token", lambda model: model.token),
    "by a name that is put together": ("self.token", lambda model: getattr(model, "to" + "ken")),
    "by a getter made elsewhere": ("self.config.seed", operator.attrgetter("config.seed")),
    "of an object": ("self.config.seed", lambda model: model.config.seed),
    "of an object's copy": ("self.config.seed", lambda model: copy.copy(model.config).seed),
    "by what a dataclass makes": ("self.config.seed", lambda model: asdict(model.config)),
    "by comparing": ("self.config.seed", lambda model: model.config == Config()),
    "by torch": ("self.norm.eps", lambda model: model.norm(torch.ones(8))),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_read_attribute_is_named(case: str) -> None:
    place, call = CALLS[case]
    model = Model()
    with Reads(model, [place, "self.size"]) as reads:
        call(model)
    with pytest.raises(UsageError, match=f"a call reads what every process has anew: {place}$"):
        reads.unread()


def test_what_is_not_read_is_told_and_the_classes_are_as_before() -> None:
    model = Model()
    before = [dict(vars(cls)) for cls in (Model, Config, nn.LayerNorm)]
    places = ["self.token", "self.config.seed", "self.norm.eps"]
    with Reads(model, places) as reads:
        assert model.config.width == 8 and model.size == "hidden"
    assert reads.unread() == tuple(places)
    assert [dict(vars(cls)) for cls in (Model, Config, nn.LayerNorm)] == before


def test_what_cannot_be_watched_is_left_to_be_compared() -> None:
    model = Model()
    setattr(model, "odd.name", 1)
    with Reads(model, ["self.table['key']", "self.odd.name", "self.answered", "self.gone.deep"]) as reads:
        assert model.answered == 6
    assert reads.unread() == ()


def test_a_watched_attribute_is_written_and_deleted_as_before() -> None:
    model = Model()
    with Reads(model, ["self.token", "self.config.seed"]):
        model.token = 4
        del model.config.seed
        with pytest.raises(AttributeError):
            del model.config.seed
    assert model.token == 4
    assert vars(model.config) == {"width": 8}
    assert model.config.seed == 1  # the class's own


def test_a_missing_attribute_is_missing_as_before() -> None:
    model, other = Model(), nn.LayerNorm(8)
    with Reads(model, ["self.norm.eps"]):
        del other.eps
        assert not hasattr(other, "eps")
