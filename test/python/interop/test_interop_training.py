"""How sums are asked for, and what divides them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine import TORCH, ours
from layouts import RANKS, by_layer
from models import batch, local, mlp
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh


def all_reduce_comes_back(rank: int) -> None:
    """set_requires_gradient_sync(True) asks for all sums, whatever was asked before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for engine in (TORCH, ours()):
        model: Any = mlp(3, 4, 2)
        engine.fully_shard(model, mesh=mesh)
        for step, summed in enumerate((False, True)):
            model.set_requires_all_reduce(False)
            if summed:
                model.set_requires_gradient_sync(True)
            model(batch(step, rank, 3)).square().sum().backward()
        found.append([local(parameter.grad) for parameter in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def divided(rank: int, layout: str) -> None:
    """A factor is the module's own, under both names; whether it is applied before the sum or after it changes no more
    than rounding does."""
    for force_sum in (False, True):
        seen: list[list[torch.Tensor]] = []
        runs = [(ours(), True), (ours(), False)]
        # Without it torch asks for a collective that Gloo does not have.
        if force_sum:
            runs.append((TORCH, True))
        for engine, factors in runs:
            model: Any = mlp(6, 8, 8, 4)
            by_layer(layout)(engine, model)
            for module in (model[0], model[2], model):
                module.set_force_sum_reduction_for_comms(force_sum)
            if factors:
                model[0].set_gradient_divide_factor(1.0)
                model[2].set_reduce_scatter_divide_factor(3.0)
            found = []
            for step in range(3):
                model(batch(step, rank, 6)).pow(2).mean().backward()
                found += [local(p.grad).clone() for p in model.parameters()]
                model.zero_grad()
            seen.append(found)
        ranks = dist.get_world_size()
        for number, (mine, mean, *theirs) in enumerate(zip(*seen, strict=True)):
            factor = {0: 1.0, 1: 3.0, 2: ranks}[number % 6 // 2]
            what = f"force_sum {force_sum}, gradient {number}"
            # torch's replicate() divides twice by a factor of one's own that comes after the sum.
            twice = factor if layout == "replicate" and number % 6 < 4 else 1
            for expected in (mean * (ranks / factor), *(each * twice for each in theirs)):
                torch.testing.assert_close(mine, expected, msg=lambda text, w=what: f"{w}: {text}")


class TestInteropTraining:
    test_divide_factors = on_ranks(RANKS, divided, each=["fully_shard", "replicate", "hsdp"])
    test_all_reduce_comes_back = on_ranks(4, all_reduce_comes_back)
