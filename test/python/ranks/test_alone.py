"""Programs that no launcher started, and those over torch's fake process group, have ranks that no other sees."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from models import counters
from pool import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def alone(rank: int, function: str) -> None:
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    model = getattr(shardwise, function)(torch.nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad.full_tensor().equal(torch.ones(2, 3))
    assert dist.get_world_size() == 1


@pytest.mark.parametrize("function", ["fully_shard", "replicate"])
def test_a_program_without_a_launcher_is_a_world_of_one(function: str) -> None:
    run_ranks(1, alone, function, backend=None)


def one_of_eight(rank: int) -> None:
    """As tools look at one rank of many."""
    dist.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
    shardwise.replicate(model[1])
    shardwise.fully_shard(model[0])
    model[0](torch.ones(2, 4)).sum().backward()
    assert model[0].weight.to_local().shape == model[0].weight.grad.to_local().shape == (2, 4)


def sums_of_one_of_two(rank: int) -> None:
    """Sums begin as soon as their gradients are there, so that buckets do not pile up."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    for layer in model:
        shardwise.fully_shard(layer)
    root = shardwise.fully_shard(model)
    for _ in range(3):
        before = counters(root)["reduce_scatters"]
        inputs = torch.ones(2, 4, requires_grad=True)
        in_backward: list[int] = []
        inputs.register_hook(lambda _, seen=in_backward: seen.append(counters(root)["reduce_scatters"]))
        root(inputs).sum().backward()
        assert in_backward[0] >= before + 3
        assert counters(root)["reduce_scatters"] - before == 4


def test_sums_over_a_fake_process_group() -> None:
    run_ranks(1, sums_of_one_of_two, backend=None)


def test_a_rank_of_a_fake_process_group() -> None:
    run_ranks(1, one_of_eight, backend=None)
