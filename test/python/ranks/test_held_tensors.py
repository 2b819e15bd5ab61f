"""What a program took from its parameters after a load, a cast or to_empty() is the memory that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from engine import KINDS, ours
from models import Beside, batch, fill, local, mlp
from pool import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

import shardwise

Wrap = Callable[[Any], Any]


def sharded(model: nn.Sequential) -> None:
    for module in (model[0], model):
        shardwise.fully_shard(module)


WRAPS: tuple[Wrap, ...] = (sharded, partial(KINDS["kept"], ours()), shardwise.replicate)


class Held:
    """Everything that a program may take once and rely on, without any use of the units."""

    def __init__(self, model: nn.Module) -> None:
        self.taken = {
            "state_dict()": model.state_dict(),
            "get_model_state_dict()": get_model_state_dict(model),
            "detach()": {name: p.detach() for name, p in model.named_parameters()},
            "local": {name: local(p) for name, p in model.named_parameters()},
            "a view": {name: local(p).view(-1) for name, p in model.named_parameters()},
        }

    def pairs(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        parameters = dict(model.named_parameters())
        for how, values in self.taken.items():
            for name, value in values.items():
                yield f"{how} of {name}", local(value), local(parameters[name])

    def check(self, model: nn.Module, when: str) -> None:
        for what, held, now in self.pairs(model):
            assert torch.equal(held.view(-1), now.view(-1)), f"{when}: {what}"
            assert held.data_ptr() == now.data_ptr(), f"{when}: {what}"


def train_held(both: Beside) -> None:
    held = Held(both.model)

    def train(steps: range) -> None:
        for step in steps:
            both.train([step])
            held.check(both.model, f"after step {step}")

    train(range(2))
    with torch.no_grad():
        for name, value in held.taken["local"].items():
            value.mul_(0.5)
            both.plain.get_parameter(name).mul_(0.5)
    train(range(2, 4))


def after_to_empty(rank: int, wrap: Wrap) -> None:
    with torch.device("meta"):
        model = mlp(5, 7, 3)
    plain = mlp(5, 7, 3)

    def wrap_and_fill(model: nn.Module) -> None:
        wrap(model)
        model.to_empty(device="cpu")
        fill(model, dict(plain.named_parameters()))

    train_held(Beside(model, wrap_and_fill, plain=plain))


def after_a_cast(rank: int, wrap: Wrap) -> None:
    both = Beside(mlp(5, 7, 3), wrap)
    for kind in (torch.float64, torch.float32):
        for each in (both.model, both.plain):
            each.to(kind)
        for optimizer in both.optimizers:
            optimizer.state.clear()
        train_held(both)
    # A part of a unit alone: nobody hears of it.
    both.model[2].double().float()
    train_held(both)


def after_a_load(rank: int, wrap: Wrap) -> None:
    def wrap_and_load(model: nn.Module) -> None:
        wrap(model)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(values, assign=True)

    train_held(Beside(mlp(5, 7, 3), wrap_and_load))


def after_a_cast_of_full_parameters(rank: int, wrap: Wrap) -> None:
    """What is done to a part of a module while it shows full parameters would be lost: it is said, and undone."""
    both = Beside(mlp(5, 7, 3), wrap)
    model, last = both.model, both.model[2]

    def forward() -> None:
        with torch.no_grad():
            model(batch(9, rank, 5))

    for spoil in (last.double, lambda: setattr(last.weight, "data", torch.zeros(3, 7))):
        forward()
        assert not isinstance(last.weight, DTensor)
        spoil()
        text = rf"rank {rank}: .* replaced the memory of the full parameter '2.weight'"
        with pytest.raises(shardwise.Error, match=text):
            forward()
        train_held(both)
    # Once the module shows what trains, a part of it may be cast.
    forward()
    model.reshard()
    last.double().float()
    train_held(both)


def each_wrap(rank: int, act: Callable[[int, Wrap], None]) -> None:
    for wrap in WRAPS:
        act(rank, wrap)


class TestHeldTensors:
    test_after_a_cast_of_full_parameters = on_ranks(2, each_wrap, after_a_cast_of_full_parameters)
    test_after_to_empty = on_ranks(2, each_wrap, after_to_empty)
    test_after_a_cast = on_ranks(2, each_wrap, after_a_cast)
    test_after_a_load = on_ranks(2, each_wrap, after_a_load)
