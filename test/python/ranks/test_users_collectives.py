"""A program's own collectives between those of units, on the process group that the units were given (T40). The same
rows as test/cpp/ranks/users_collectives_test.cpp."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import shared_mesh
from models import Beside, batch
from pool import on_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwise

WIDTH = 6


def late(random_numbers: random.Random) -> None:
    if random_numbers.randrange(3) == 0:
        time.sleep(random_numbers.uniform(0, 0.004))


class SumOverRanks(torch.autograd.Function):
    """Adds up over the ranks, forward and backward, each of them late at random."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: list[dist.ProcessGroup], numbers: random.Random) -> torch.Tensor:
        ctx.groups, ctx.numbers = groups, numbers
        total = x.clone()
        for group in groups:
            late(numbers)
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.clone()
        for group in ctx.groups:
            late(ctx.numbers)
            dist.all_reduce(total, group=group)
        return total, None, None


class Summing(nn.Module):
    """Three layers; what ranks have is added up between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, add_up: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number > 0:
                x = add_up(x)
            x = torch.tanh(layer(x))
        return x


def summing_loss(groups: list[dist.ProcessGroup], numbers: random.Random) -> Callable[[Any, int, int], torch.Tensor]:
    """Of a model on ranks that of its data, and of one process the mean over all, which has the data of all."""

    def loss(model: Any, step: int, rank: int) -> torch.Tensor:
        if any(isinstance(p, DTensor) for p in model.parameters()):
            late(numbers)
            return model(batch(step, rank, WIDTH), lambda x: SumOverRanks.apply(x, groups, numbers)).pow(2).mean()
        inputs = torch.stack([batch(step, each, WIDTH) for each in range(dist.get_world_size())])
        return model(inputs, lambda parts: parts.sum(0, keepdim=True).expand_as(parts)).pow(2).mean()

    return loss


def wrap(model: Summing, mode: str, mesh: DeviceMesh) -> None:
    if mode == "part":  # DDP around a part, on the same process group.
        shardwise.fully_shard(model.layers[0], mesh=mesh)
        model.layers[1] = DistributedDataParallel(model.layers[1], process_group=mesh.get_group())
        shardwise.fully_shard(model.layers[2], mesh=mesh)
        return
    for layer in model.layers:
        shardwise.replicate(layer, mesh=mesh) if mode == "replicate" else shardwise.fully_shard(layer, mesh=mesh)
    if mode != "replicate":
        shardwise.fully_shard(model, mesh=mesh, reshard_after_forward=mode != "kept")


def trains_as_one_process(rank: int, modes: list[str]) -> None:
    for mode in modes:
        mesh = shared_mesh((2, 2), ("replicate", "shard")) if mode == "hsdp" else shared_mesh((dist.get_world_size(),))
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        loss = summing_loss(groups, random.Random(rank))
        Beside(Summing(), lambda model, mode=mode, mesh=mesh: wrap(model, mode, mesh), loss).train(range(5))


def goes_our_way(rank: int, expected: str) -> None:
    for function in (shardwise.fully_shard, shardwise.replicate):
        model = function(nn.Linear(4, 4))
        model(batch(0, rank, 4)).sum().backward()
        assert expected in str(shardwise.plan(model)), shardwise.plan(model)


class TestUsersCollectives:
    @pytest.mark.parametrize("backend", ["gloo", "shardwise"])
    def test_between_those_of_units_in_backward(self, backend: str) -> None:
        modes = ["rows", "kept", "replicate", "part"]
        run_ranks(2, trains_as_one_process, modes, backend=backend)

    test_along_both_axes = on_ranks(4, trains_as_one_process, ["hsdp"])

    def test_units_of_a_program_with_gloo_take_our_transport(self) -> None:
        run_ranks(2, goes_our_way, ", shared memory)")
        run_ranks(2, goes_our_way, ", TCP)", environment={"SHARDWISE_SHARED_MEMORY": "off"})
        run_ranks(2, goes_our_way, " on cpu)", environment={"SHARDWISE_TRANSPORT": "gloo"})
