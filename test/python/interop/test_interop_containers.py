"""Outputs in containers: a unit has to know the tensors in them, to be whole in their backward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from engine import TORCH, ours
from models import batch
from parity import Parity, Program, assert_same_bits, by_child
from pool import on_ranks
from torch import nn
from torch.utils._pytree import tree_leaves

WIDTH = 6


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Data:
    first: torch.Tensor
    second: Any
    number: int = 3


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda x, y: (x, None, y),
    "list": lambda x, y: [x, [y, "text"]],
    "dict": lambda x, y: {"x": x, "y": y, "n": 2.0},
    "OrderedDict": lambda x, y: OrderedDict(x=x, y=y),
    "NamedTuple": Named,
    "dataclass": Data,
    "dataclass in a dict": lambda x, y: {"data": Data(x, [y])},
}
#: torch's engine sees through all but these.
ONLY_OURS = ("dataclass", "dataclass in a dict")


def tensors(value: Any) -> Iterable[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Data):
            yield from tensors(vars(leaf))
        elif isinstance(leaf, torch.Tensor):
            yield leaf


class Layer(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        x = sum(tensors(given))
        return FORMS[self.form](self.right(torch.tanh(self.left(x))), self.left(x))


def program_of(form: str) -> Program:
    def make() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(*(Layer(form) for _ in range(3)))

    def loss(model: Any, number: int, rank: int) -> torch.Tensor:
        return sum(each.pow(2).mean() for each in tensors(model(batch(number, rank, WIDTH))))  # type: ignore[return-value]

    return Program(make, loss, steps=3)


def contained(rank: int, form: str) -> None:
    parity = Parity(program_of(form))
    mine = parity.run(ours(), by_child("fully_shard"))
    if form not in ONLY_OURS:
        assert_same_bits(mine, parity.run(TORCH, by_child("fully_shard")))


class TestInteropContainers:
    test_outputs = on_ranks(2, contained, each=[*FORMS])
