"""set_reduce_scatter_max_input_buffers() and set_keep_unsharded_storage(): what they change, and what they do not."""

from __future__ import annotations

from typing import Any

import torch
from engine import TORCH, ours
from models import batch, local, mlp
from pool import run_ranks
from torch import nn

import shardwise

WIDTHS = (6, 8, 8, 8, 4)


def wrapped(**options: Any) -> Any:
    model = mlp(*WIDTHS)
    for layer in model:
        if isinstance(layer, nn.Linear):
            shardwise.fully_shard(layer, **options)
    return shardwise.fully_shard(model, **options)


def train(model: Any, rank: int, steps: int = 3) -> list[torch.Tensor]:
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(batch(step, rank, WIDTHS[0])).pow(2).sum().backward()
        seen += [local(parameter.grad).clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def sums_in_flight(rank: int) -> None:
    expected = train(wrapped(), rank)
    # C++ counts them: test/cpp/ranks/sums_in_flight_test.cpp.
    for most in (1, 3):
        model = wrapped()
        # The most that any module says.
        model[2].set_reduce_scatter_max_input_buffers(most, recurse=False)
        for mine, theirs in zip(train(model, rank), expected, strict=True):
            assert torch.equal(mine, theirs)
    small, large = (estimate(count) for count in (1, 3))
    assert large.pool > small.pool


def estimate(count: int) -> Any:
    model = mlp(64, 64, 64, 64, 64)
    units = [layer for layer in model if isinstance(layer, nn.Linear)]
    return shardwise.estimate_memory(model, 2, units=units, reduce_scatter_max_input_buffers=count)


def kept_storage(rank: int) -> None:
    """Addresses stay from step to step, here as in torch's engine; each unit has memory of its own."""
    for engine in (ours(), *([TORCH] if hasattr(TORCH.FSDPModule, "set_keep_unsharded_storage") else [])):
        model: Any = mlp(*WIDTHS)
        layers: list[Any] = [layer for layer in model if isinstance(layer, nn.Linear)]
        for layer in layers:
            engine.fully_shard(layer)
        engine.fully_shard(model)
        model.set_keep_unsharded_storage(True)
        seen: list[list[int]] = []

        def note(layer: Any, *_: Any, seen: list[list[int]] = seen) -> None:
            seen[-1].append(layer.weight.data_ptr())

        for layer in layers:
            layer.register_forward_pre_hook(note)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            seen.append([])
            model(batch(step, rank, WIDTHS[0])).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert seen[1] == seen[2] == seen[3], engine.name
        assert len(set(seen[1])) == len(layers), engine.name
    expected = train(wrapped(), rank)
    model = wrapped()
    model.set_keep_unsharded_storage(True)
    for mine, theirs in zip(train(model, rank), expected, strict=True):
        assert torch.equal(mine, theirs)
    # Through a cast and back, and off again.
    model.double()
    model.float()
    train(model, rank, 1)
    model.set_keep_unsharded_storage(False)
    train(model, rank, 1)


class TestMemorySettings:
    def test_sums_in_flight(self) -> None:
        run_ranks(2, sums_in_flight)

    def test_kept_storage(self) -> None:
        run_ranks(2, kept_storage)
