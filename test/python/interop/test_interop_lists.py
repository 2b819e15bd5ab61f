"""Lists of modules in one call: what happens at the first module that runs, at the last, and at each."""

from __future__ import annotations

from typing import Any

import torch
from engine import TORCH, ours
from models import batch
from parity import counting
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint


class Between(nn.Module):
    """Two modules of one list, and one of its own that runs between them."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.checkpointed = checkpointed
        #: What each was given, and what it gave.
        self.seen: list[tuple[str, torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("first", "middle", "last"):
            module = self.get_submodule(name)
            given = x
            x = checkpoint(module, x, use_reentrant=False) if self.checkpointed else module(x)
            self.seen.append((name, given.dtype, x.dtype))
        return x


def gathered_once(rank: int) -> None:
    """The middle one is brought when the list begins, and not once more when its second module does."""
    counts = []
    for engine in (TORCH, ours()):
        model: Any = Between()
        engine.fully_shard([model.first, model.last])
        engine.fully_shard(model.middle)
        engine.fully_shard(model)
        model(batch(0, rank, 4))
        model.first.set_modules_to_forward_prefetch([model.middle])
        seen: dict[str, int] = {}
        with torch.no_grad(), counting(seen, "calls"):
            model(batch(1, rank, 4))
        counts.append(seen["_allgather_base_"])
    assert counts == [2, 2]


def cast_each(rank: int) -> None:
    """Each module of a list is given and gives what the policy says, whichever of them run; torch casts at the ends."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model: Any = Between()
    engine = ours()
    engine.fully_shard([model.first, model.last], mp_policy=policy)
    engine.fully_shard(model.middle, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    engine.fully_shard(model)
    for step in range(3):
        model.zero_grad()
        model.seen.clear()
        x = batch(step, rank, 4)
        out = model(x)
        assert [gave for _, _, gave in model.seen] == [torch.float64, torch.bfloat16, torch.float64]
        # Nobody runs the other one: what comes out is of the same dtype.
        alone = {name: model.get_submodule(name)(x) for name in ("last", "first", "last")}
        assert {each.dtype for each in alone.values()} == {torch.float64}
        (out.sum() + alone["first"].sum()).backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def computed_again(rank: int) -> None:
    """In backward each module converts what it converted in forward: a checkpoint compares the dtypes."""
    gradients = []
    for checkpointed in (False, True):
        model: Any = Between(checkpointed)
        engine = ours()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        engine.fully_shard([model.first, model.middle, model.last], mp_policy=policy)
        engine.fully_shard(model)
        model(batch(0, rank, 4)).sum().backward()
        assert [gave for _, _, gave in model.seen] == [torch.float32] * 3
        gradients.append([p.grad.to_local() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class TestInteropLists:
    test_gathered_once = on_ranks(2, gathered_once)
    test_casts_each = on_ranks(2, cast_each)
    test_computed_again = on_ranks(2, computed_again)
