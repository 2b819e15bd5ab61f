"""Settings and calls about memory: what they change, and what they do not."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from models import batch, local, mlp
from pool import on_ranks
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
    model = wrapped()
    # The most that any module says.
    model[2].set_reduce_scatter_max_input_buffers(3, recurse=False)
    assert all(map(torch.equal, train(model, rank), expected))
    assert estimate(3).backward_peak > estimate(1).backward_peak


def no_offload_policy(rank: int) -> None:
    """None is the default, as for torch's function: verl passes it."""
    assert all(map(torch.equal, train(wrapped(offload_policy=None), rank), train(wrapped(), rank)))


def symmetric_memory(rank: int) -> None:
    """torch's engine fails at the first gather where there is none; ours goes on without."""
    model = wrapped()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in model.modules():
            if isinstance(module, shardwise.FSDPModule):
                module.set_symm_mem_for_comm()
    assert ["has no effect" in str(each.message) for each in caught] == [True]
    assert all(map(torch.equal, train(model, rank), train(wrapped(), rank)))


def estimate(count: int) -> Any:
    model = mlp(64, 64, 64, 64, 64)
    units = [layer for layer in model if isinstance(layer, nn.Linear)]
    return shardwise.estimate_memory(model, 2, units=units, reduce_scatter_max_input_buffers=count)


def kept_storage(rank: int) -> None:
    """Addresses stay from step to step; each unit has memory of its own."""
    model = wrapped()
    model.set_keep_unsharded_storage(True)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    seen: list[int] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.data_ptr()))
    assert all(map(torch.equal, train(model, rank, 4), train(wrapped(), rank, 4)))
    count = len(layers)
    assert len(set(seen[count : 2 * count])) == count and seen[count:] == 3 * seen[count : 2 * count]
    # Through a cast and back, and off again.
    model.double()
    model.float()
    train(model, rank, 1)
    model.set_keep_unsharded_storage(False)
    train(model, rank, 1)


def idle_memory(rank: int) -> None:
    """The pages go back, and the next step has them again, with the same bits."""
    width = 1024

    def step(model: Any) -> torch.Tensor:
        model.zero_grad()
        model(batch(0, rank, width)).sum().backward()
        return local(model[0].weight.grad).clone()

    models = [shardwise.fully_shard(mlp(width, width)) for _ in range(2)]
    for _ in range(3):
        expected = step(models[0])
        assert step(models[1]).equal(expected)
        before = resident()
        shardwise.free_idle_memory(models[1])
        assert before - resident() >= 4 * width * width


def resident() -> int:
    """This process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestMemorySettings:
    test_idle_memory = on_ranks(2, idle_memory)
    test_sums_in_flight = on_ranks(2, sums_in_flight)
    test_kept_storage = on_ranks(2, kept_storage)
    test_symmetric_memory = on_ranks(2, symmetric_memory)
    test_no_offload_policy = on_ranks(2, no_offload_policy)
