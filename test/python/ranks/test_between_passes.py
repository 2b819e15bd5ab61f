"""What programs do between a forward and its backward, and between backwards: they see what torch's engine shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from engine import KINDS, TORCH, Engine, ours
from models import Block, batch, local
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WIDTH, STEPS = 6, 6
Seen = list[dict[str, Tensor | None]]


def wrapped(engine: Engine, kind: str) -> Any:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(WIDTH, WIDTH), Block(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    for module in (model[1], model[2], model):
        KINDS[kind](engine, module)
    return model


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    return model(batch(step, rank, WIDTH)).float().pow(2).mean()  # type: ignore[no-any-return]


def shown(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of what the modules show."""
    return {n: None if p.grad is None else local(p.grad).clone() for n, p in model.named_parameters()}


def frozen(model: Any, step: int, rank: int) -> None:
    loss = loss_of(model, step, rank)
    model[1].requires_grad_(step % 3 != 1)
    model[2].up.weight.requires_grad_(step % 3 != 2)
    loss.backward()


def frozen_between_backwards(model: Any, step: int, rank: int) -> None:
    loss = loss_of(model, step, rank)
    loss.backward(retain_graph=True)
    model[1].requires_grad_(False)
    loss.backward()
    model[1].requires_grad_(True)


def frozen_before_the_sum(model: Any, step: int, rank: int) -> None:
    model.set_requires_gradient_sync(step % 2 == 1)
    frozen(model, step, rank)


def not_the_last(model: Any, step: int, rank: int) -> None:
    model.set_is_last_backward(False)
    loss_of(model, step, rank).backward()


def without_sync(model: Any, step: int, rank: int) -> None:
    model.set_requires_gradient_sync(step % 3 == 2)
    model.set_reshard_after_backward(step % 3 == 2)
    loss_of(model, step, rank).backward()


def changed_without_sync(model: Any, step: int, rank: int) -> None:
    without_sync(model, step, rank)
    if step == 0:
        model[1].zero_grad()
    if step == 3:
        model[2].up.weight.grad *= 2
        model[2].up.bias.grad = torch.ones_like(model[2].up.bias.grad)


def sync_set_after_the_forward(model: Any, step: int, rank: int) -> None:
    model.set_requires_gradient_sync(step % 2 == 1)
    loss = loss_of(model, step, rank)
    model.set_requires_gradient_sync(step % 3 == 2)
    model[2].set_requires_gradient_sync(step == 5)
    loss.backward()


PROGRAMS = (
    frozen, frozen_between_backwards, frozen_before_the_sum, not_the_last, without_sync, changed_without_sync,
    sync_set_after_the_forward,
)  # fmt: skip


def run(engine: Engine, kind: str, program: Callable[[Any, int, int], None], rank: int) -> Seen:
    model = wrapped(engine, kind)
    seen = []
    for step in range(STEPS):
        program(model, step, rank)
        seen.append(shown(model))
        if step % 3 == 2:
            model.zero_grad()
    return seen


def as_torch(rank: int, kind: str) -> None:
    for program in PROGRAMS:
        for step, (mine, theirs) in enumerate(
            zip(run(ours(), kind, program, rank), run(TORCH, kind, program, rank), strict=True)
        ):
            for name, one in mine.items():
                other = theirs[name]
                same = one is other is None or (one is not None and other is not None and torch.equal(one, other))
                assert same, f"{program.__name__}, {kind}, step {step}, {name}: {one} for {other}"


def with_switches(model: Any, first: bool, switches: bool, rank: int) -> Seen:
    seen = []
    for step in range(4):
        model.set_requires_gradient_sync(first if step % 2 == 0 else True)
        hook = model[1].register_full_backward_hook(lambda *_: model.set_requires_gradient_sync(not first))
        if step % 2 == 1 or not switches:
            hook.remove()
        loss_of(model, step, rank).backward()
        hook.remove()
        seen.append(shown(model))
    return seen


def switched_within(rank: int, kind: str) -> None:
    # What is set within a backward counts from the next one on: ranks may differ in how far theirs is.
    for first in (True, False):
        one, other = (with_switches(wrapped(ours(), kind), first, switches, rank) for switches in (True, False))
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Attention(nn.Module):
    """Its first part is a unit that gets one tensor as three inputs. Its second part has residuals of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.MultiheadAttention(8, 2, batch_first=True)
        self.second = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x, need_weights=False)[0]
        return x + self.second(x)  # type: ignore[no-any-return]


def as_without_units(rank: int, kind: str) -> None:
    mine, plain = Attention(), Attention()
    for module in (mine.first, mine.second, mine):
        KINDS[kind](ours(), module)
    for model in (mine, plain):
        model(torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(rank))).pow(2).mean().backward()
    for (name, one), other in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(one.grad, DTensor) and other.grad is not None
        other.grad /= 2
        dist.all_reduce(other.grad)
        assert torch.equal(one.grad.full_tensor(), other.grad), name


class TestBetweenPasses:
    test_as_with_torch = on_ranks(2, as_torch, each=[*KINDS])
    test_sync_that_is_switched_within_a_backward = on_ranks(2, switched_within, each=[*KINDS])
    test_inputs_are_passed_on_as_they_are = on_ranks(2, as_without_units, each=["sharded", "kept", "replicated"])
