"""What users do with gradients that they hold: they keep them, in whichever form, or make other tensors of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engine import Engine, ours
from layouts import by_layer
from models import batch, local, mlp
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

WIDTHS = (6, 8, 4)
STEPS = 4

#: What somebody keeps of a gradient, and the values that he finds there.
HOLD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], torch.Tensor]]] = {
    "the DTensor": (lambda gradient: gradient, local),
    "its local tensor": (lambda gradient: gradient.to_local(), local),
    "its local tensor, with autograd": (torch.enable_grad()(lambda gradient: gradient.to_local()), local),
    "a view": (lambda gradient: gradient.to_local().view(-1), local),
    "another DTensor around it": (lambda gradient: gradient.detach(), local),
    "an array": (lambda gradient: gradient.to_local().numpy(), torch.from_numpy),
    "its memory": (lambda gradient: place_of(gradient.to_local()), lambda place: torch.empty(0).set_(*place)),
}


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()


def wrapped(engine: Engine, layout: str, **options: Any) -> nn.Module:
    model = mlp(*WIDTHS)
    by_layer(layout, **options)(engine, model)
    return model


def train(model: nn.Module, rank: int, see: Callable[[nn.Module], None]) -> list[list[torch.Tensor]]:
    """The gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        model(batch(step, rank, WIDTHS[0])).pow(2).sum().backward()
        found.append([local(p.grad).clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        see(model)
        optimizer.zero_grad()
    return found


def same(mine: list[list[torch.Tensor]], expected: list[list[torch.Tensor]], what: str) -> None:
    assert all(len(step) == 4 for step in expected)
    for step, (some, others) in enumerate(zip(mine, expected, strict=True)):
        assert all(map(torch.equal, some, others)), f"{what}, step {step}: {some} for {others}"


@torch.no_grad()
def gradients_of(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def held(rank: int, layout: str) -> None:
    for some in ({}, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}):
        expected = train(wrapped(ours(), layout, **some), rank, lambda _: None)
        for what, (hold, values) in HOLD.items():
            kept: list[tuple[Any, torch.Tensor]] = []

            @torch.no_grad()
            def keep(model: nn.Module, hold: Any = hold, kept: Any = kept) -> None:
                kept.extend((hold(g), local(g).clone()) for g in gradients_of(model))

            same(train(wrapped(ours(), layout, **some), rank, keep), expected, what)
            assert len(kept) == 4 * STEPS
            for number, (holding, value) in enumerate(kept):
                found = values(holding)
                assert torch.equal(found.detach().view(value.shape), value), f"{what}, gradient {number}: {found}"


class TestGradients:
    test_held = on_ranks(2, held, each=["fully_shard", "replicate"])
