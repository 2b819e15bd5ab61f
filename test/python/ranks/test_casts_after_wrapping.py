"""Modules that are cast after they were wrapped: what they compute in is what the policy says, before and after."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from models import Beside, batch, counters, mlp, rounded_backward, whole
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardwise

LOW, HIGH = torch.bfloat16, torch.float32
KINDS = ("fully_shard", "replicate")
POLICY = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=HIGH)


class Rounded(Beside):
    """Beside one process that rounds, computes for all ranks, and sums by hand: with two ranks to the same bits."""

    def backward(self, step: int) -> None:
        self.loss(self.model, step, self.rank).backward()
        rounded_backward(self.plain, lambda low, rank: self.loss(low, step, rank), self.ranks, LOW, HIGH)

    def compare(self, name: str, mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        assert isinstance(mine, DTensor)
        assert mine.dtype == mine.to_local().dtype == theirs.dtype, what
        # Steps on a shard of 16 bits are rounded otherwise than steps on all of it.
        is_rounded = mine.dtype == LOW and mine.placements[0].is_shard()
        close = {"rtol": 1e-2, "atol": 1e-3} if is_rounded else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(whole(mine), theirs, **close, msg=what)

    def step(self, what: str = "") -> None:
        super().step(what)
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
                theirs.copy_(whole(mine))


def loss(model: Any, step: int, rank: int) -> torch.Tensor:
    out: torch.Tensor = model(batch(step, rank, 5).to(model[0].bias.dtype))
    assert out.dtype == LOW
    return out.to(HIGH).pow(2).mean()


def cast_later(rank: int, kind: str, first: torch.dtype) -> None:
    def wrap(model: nn.Sequential) -> None:
        for module in (model[0], model):
            getattr(shardwise, kind)(module, mp_policy=POLICY)

    # The optimizers are made before the casts: they hold what trains, whatever becomes of the dtypes.
    both = Rounded(mlp(5, 7, 3).to(first), wrap, loss)
    for number, now in enumerate((first, HIGH, LOW, torch.float64)):
        for model, optimizer in zip((both.model, both.plain), both.optimizers, strict=True):
            model.to(now)
            optimizer.state.clear()
        before = counters(both.model)["unsharded_bytes"]
        both.train(range(3 * number, 3 * number + 3))
        if kind == "replicate":
            copied = counters(both.model)["unsharded_bytes"] > before
            assert copied == (now != LOW), "copies are made where dtypes differ, and nowhere else"


def strided(rank: int) -> None:
    """What copies cannot be made of is refused when they are needed, by name."""
    model = mlp(5, 7, 3).to(LOW)
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    shardwise.replicate(model, mp_policy=POLICY)
    loss(model, 0, rank).backward()
    with pytest.raises(ValueError, match=r"'0\.weight' has sizes .* Make it contiguous\(\) before replicate\(\)"):
        model.to(HIGH)


class TestCastsAfterWrapping:
    test_all = on_ranks(2, cast_later, each=[*product(KINDS, (LOW, HIGH))])
    test_of_what_is_not_contiguous = on_ranks(2, strided)
