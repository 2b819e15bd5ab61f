"""Modules that are cast after they were wrapped: what they compute in is what the policy says, before and after."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from models import batch, counters, mlp
from parity import momentum
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardwise

LOW, HIGH = torch.bfloat16, torch.float32
KINDS = ("fully_shard", "replicate")
POLICY = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=HIGH)


class Reference:
    """One process that rounds, computes for all ranks, and sums by hand. With two ranks every bit is the same."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = momentum(self.model)

    def step(self, number: int) -> None:
        sums = [torch.zeros_like(p, dtype=HIGH) for p in self.model.parameters()]
        for rank in range(2):
            low = copy.deepcopy(self.model).to(LOW)
            loss(low, batch(number, rank, 5).to(LOW)).backward()
            for total, p in zip(sums, low.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad.to(HIGH) / 2
        for total, p in zip(sums, self.model.parameters(), strict=True):
            p.grad = total.to(p.dtype)
        self.optimizer.step()


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    assert out.dtype == LOW
    return out.to(HIGH).pow(2).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, reference: Reference, rank: int, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        loss(model, batch(number, rank, 5)).backward()
        reference.step(number)
        optimizer.step()
        for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
            assert isinstance(p, DTensor) and isinstance(p.grad, DTensor) and q.grad is not None
            assert p.dtype == p.to_local().dtype == p.grad.dtype == q.dtype, f"{name} in step {number}"
            # Steps on a shard of 16 bits are rounded otherwise than steps on all of it.
            is_rounded = p.dtype == LOW and p.placements[0].is_shard()
            close = {"rtol": 1e-2, "atol": 1e-3} if is_rounded else {"rtol": 0, "atol": 0}
            for ours, theirs in ((p.grad, q.grad), (p, q.detach())):
                torch.testing.assert_close(ours.full_tensor(), theirs, **close, msg=f"{name}, step {number}")
            with torch.no_grad():
                q.copy_(p.full_tensor())


def cast_later(rank: int, kind: str, first: torch.dtype) -> None:
    wrap = getattr(shardwise, kind)
    model = mlp(5, 7, 3).to(first)
    reference = Reference(model)
    wrap(model[0], mp_policy=POLICY)
    wrap(model, mp_policy=POLICY)
    # Made before the casts: it holds what trains, whatever becomes of the dtypes.
    optimizer = momentum(model)
    for number, now in enumerate((first, HIGH, LOW, torch.float64)):
        model.to(now)
        reference.model.to(now)
        for each in (optimizer, reference.optimizer):
            each.state.clear()
        before = counters(model)["unsharded_bytes"]
        train(model, optimizer, reference, rank, range(3 * number, 3 * number + 3))
        if kind == "replicate":
            copied = counters(model)["unsharded_bytes"] > before
            assert copied == (now != LOW), "copies are made where dtypes differ, and nowhere else"


def strided(rank: int) -> None:
    """What copies cannot be made of is refused when they are needed, by name."""
    model = mlp(5, 7, 3).to(LOW)
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    shardwise.replicate(model, mp_policy=POLICY)
    loss(model, batch(0, rank, 5)).backward()
    with pytest.raises(ValueError, match=r"'0\.weight' has sizes .* Make it contiguous\(\) before replicate\(\)"):
        model.to(HIGH)


class TestCastsAfterWrapping:
    test_all = on_ranks(2, cast_later, each=[*product(KINDS, (LOW, HIGH))])
    test_of_what_is_not_contiguous = on_ranks(2, strided)
