"""Programs in local steps that they do not know of, and without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from engine import Engine, ours
from layouts import by_layer
from models import assert_same_tree, batch, local, mlp
from test_interop_optimizers import WIDTHS, optimizer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

import shardwise
from shardwise import _automatic_steps

Make = Callable[[nn.Module], Optimizer]

ADAM, FUSED = optimizer(Adam, eps=0.1), optimizer(AdamW, eps=0.1, fused=True)


@contextmanager
def counted() -> Iterator[list[Optimizer]]:
    """The optimizers of the steps that were made locally."""
    steps: list[Optimizer] = []
    real = _automatic_steps.step_locally

    def count(one: Optimizer, *others: Any, **options: Any) -> None:
        real(one, *others, **options)
        steps.append(one)

    with mock.patch.object(_automatic_steps, "step_locally", count):
        yield steps


@contextmanager
def automatic() -> Iterator[list[Optimizer]]:
    shardwise.set_local_optimizers(True)
    try:
        with counted() as steps:
            yield steps
    finally:
        shardwise.set_local_optimizers(False)


def both_ways(program: Callable[[], Any], local_steps: int) -> tuple[Any, Any]:
    """What a program returns in local steps, of which there must be so many, and without them."""
    with automatic() as steps:
        mine = program()
    assert len(steps) == local_steps, f"{len(steps)} local steps"
    with counted() as steps:
        usual = program()
    assert steps == []
    return mine, usual


def wrapped(layout: str = "fully_shard", engine: Engine | None = None) -> Any:
    model = mlp(*WIDTHS)
    by_layer(layout)(engine or ours(), model)
    return model


def advance(model: Any, one: Optimizer, step: int, rank: int) -> torch.Tensor:
    one.zero_grad()
    loss: torch.Tensor = model(batch(step, rank, WIDTHS[0])).pow(2).mean()
    loss.backward()
    one.step()
    return loss.detach()


def assert_same_values(models: list[Any]) -> None:
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(one), local(other)), f"{name}: {local(one)} for {local(other)}"


def assert_same_state(mine: Optimizer, usual: Optimizer) -> None:
    """By parameter, in the same order."""
    assert len(mine.state) > 0 and all(isinstance(parameter, DTensor) for parameter in mine.state)
    assert_same_tree([*mine.state.values()], [*usual.state.values()])
