"""Lists of modules in one call: what happens at the first module that runs, and what at the last."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from engine import TORCH, Engine, ours
from models import batch
from pool import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
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


class Gathers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


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
        with torch.no_grad(), Gathers() as gathers:
            model(batch(1, rank, 4))
        counts.append(gathers.counts["_allgather_base_"])
    assert counts == [2, 2]


def with_casts(engine: Engine, rank: int) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    model: Any = Between()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    engine.fully_shard([model.first, model.last], mp_policy=policy)
    engine.fully_shard(model)
    # The middle module's weights decide what the last one is given.
    model.middle.to(torch.float64)
    model.middle.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    model.middle.register_forward_hook(lambda _, args, output: output.float())
    loss = model(batch(0, rank, 4).double()).float().pow(2).sum()
    loss.backward()
    return model, loss.detach(), [p.grad.to_local() for p in model.parameters()]


def cast_at_the_ends(rank: int) -> None:
    (theirs, their_loss, their_gradients), (mine, loss, gradients) = (with_casts(e, rank) for e in (TORCH, ours()))
    assert mine.seen == theirs.seen
    # Inputs at the first module of the list alone, outputs at the last alone.
    assert [given for _, given, _ in mine.seen] == [torch.float64, torch.float32, torch.float32]
    assert [gave for _, _, gave in mine.seen] == [torch.float32, torch.float32, torch.bfloat16]
    assert torch.equal(loss, their_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, their_gradients, strict=True))


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
        assert [gave for _, _, gave in model.seen] == [torch.bfloat16, torch.bfloat16, torch.float32]
        gradients.append([p.grad.to_local() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def one_after_the_other(rank: int) -> None:
    """Not all modules of a list need run: the next forward begins the list anew."""
    engine = ours()
    model: Any = Between()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    engine.fully_shard([model.first, model.last], mp_policy=policy)
    engine.fully_shard(model, mp_policy=policy)
    model(batch(0, rank, 4)).sum().backward()
    for name in ("first", "last", "last", "first"):
        for parameter in model.parameters():
            parameter.grad = None
        out = model.get_submodule(name)(batch(1, rank, 4))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        found = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
        assert found == {f"{name}.weight", f"{name}.bias"}


class TestInteropLists:
    def test_gathered_once(self) -> None:
        run_ranks(2, gathered_once)

    def test_casts_at_the_ends(self) -> None:
        run_ranks(2, cast_at_the_ends)

    def test_computed_again(self) -> None:
        run_ranks(2, computed_again)

    def test_one_after_the_other(self) -> None:
        run_ranks(2, one_after_the_other)
