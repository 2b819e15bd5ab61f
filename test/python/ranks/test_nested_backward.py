"""Backwards that run inside another backward: gradients are those averaged by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import TORCH, Engine, ours
from models import Layer, batch, local, whole
from pool import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, STEPS = 8, 3


class Within(Layer):
    """Recomputes itself."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


class Coupled(Layer):
    """A pair of layers that changes both halves of its input, and tells from its output what that was."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.other = Layer(width, hidden)

    def forward(self, x: Tensor, undoes: bool = False) -> Tensor:
        first, second = x.chunk(2, -1)
        if undoes:
            second = second - self.other(first)
            first = first - super().forward(second)
        else:
            first = first + super().forward(second)
            second = second + self.other(first)
        return torch.cat((first, second), -1)


class Tiled(torch.autograd.Function):
    """Runs a module piece by piece, once more in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, graph: bool) -> Tensor:
        ctx.module, ctx.graph = module, graph
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([module(piece) for piece in x.chunk(2)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        found = []
        for piece, wanted in zip(ctx.saved_tensors[0].chunk(2), gradient.chunk(2), strict=True):
            with torch.enable_grad():
                piece = piece.detach().requires_grad_()
                result = ctx.module(piece)
            torch.autograd.backward(result, wanted, create_graph=ctx.graph)
            found.append(piece.grad.detach())
        return torch.cat(found), None, None


class InBlocks(torch.autograd.Function):
    """Keeps its output alone: in its backward each block first finds its input, then runs again with a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: list[nn.Module]) -> Tensor:
        ctx.blocks = blocks
        with torch.no_grad():
            for block in blocks:
                x = block(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        for block in reversed(ctx.blocks):
            with torch.no_grad():
                x = block(x.detach(), undoes=True)
            with torch.enable_grad():
                x = x.requires_grad_()
                result = block(x)
            torch.autograd.backward(result, gradient)
            gradient = x.grad
        return gradient, None


def head_in_pieces(model: Model, x: Tensor) -> Tensor:
    """The head's part of the backward runs within the forward, a piece of the batch at a time."""
    for layer in model.layers:
        x = x + layer(x)
    hidden = x.detach().requires_grad_()
    for piece in hidden.chunk(2):
        (model.head(piece).pow(2).sum() + model.stem(piece).pow(2).mean()).backward()
    return HandsOn.apply(x, hidden.grad)  # type: ignore[no-any-return]


def layers_in_forward(model: Model, x: Tensor) -> Tensor:
    """Whole units have their backward within the forward of the one around them, and run again after it."""
    for layer in model.layers:
        x.retain_grad()
        layer(x).pow(2).mean().backward(retain_graph=True)
        x = x + layer(x)
    return x


class HandsOn(torch.autograd.Function):
    """Has a gradient that is there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def around(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + checkpoint(layer, x, use_reentrant=True)
    return x


def one_after_another(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer(x)
    return x


def tiled(model: Model, x: Tensor, graph: bool = False) -> Tensor:
    for layer in model.layers:
        x = x + Tiled.apply(x, layer, graph)
    return x + layer(x)  # gets gradients from both backwards


def reversible_blocks(model: Model, x: Tensor) -> Tensor:
    first, second = InBlocks.apply(torch.cat((x, x), -1), list(model.layers)).chunk(2, -1)
    return first + second  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, layer: type[Layer], run: Callable[[Model, Tensor], Tensor], has_head: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer(WIDTH, 2 * WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3) if has_head else nn.Identity()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self, self.stem(x)))  # type: ignore[no-any-return]


WAYS: dict[str, tuple[type[Layer], Callable[[Model, Tensor], Tensor]]] = {
    "around": (Layer, around),
    "within": (Within, one_after_another),
    "tiled": (Layer, tiled),
    "two deep": (Within, tiled),
    "with a graph": (Layer, partial(tiled, graph=True)),
    "head in pieces": (Layer, head_in_pieces),
    "layers in forward": (Layer, layers_in_forward),
    "reversible blocks": (Coupled, reversible_blocks),
}
# torch's engine keeps one of the two gradients of a unit of `tiled`, and has no parameters after a unit's backward.
NOT_TORCHS = ("tiled", "two deep", "with a graph", "layers in forward")
# A backward within the forward is over before the other one begins: hooks run for each.
IN_FORWARD = ("head in pieces", "layers in forward")
IN_PARTS = ("tiled", "two deep", "with a graph", *IN_FORWARD)


def trained(rank: int, way: str, wrap: Callable[[Model], Any], has_head: bool, hooks_run_once: bool) -> list[Tensor]:
    """Losses, then whole gradients of each step."""
    seen: dict[Tensor, list[Tensor]] = {}
    model = Model(*WAYS[way], has_head).double()
    average = wrap(model)

    def see(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.setdefault(parameter, []).append(local(parameter.grad).clone())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(see)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, rank, WIDTH).double()).pow(2).mean()
        loss.backward()
        average()
        found.append(loss.detach())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{way}, step {step}: {name} has no gradient"
            at_hook = seen.pop(parameter)
            if hooks_run_once:
                assert len(at_hook) == 1, f"{way}, step {step}: the hook of {name} ran {len(at_hook)} times"
                assert torch.equal(at_hook[0], local(parameter.grad)), f"{way}, step {step}: {name} in its hook"
            found.append(whole(parameter.grad).clone())
        optimizer.step()
    return found


def by_units(engine: Engine, kind: str) -> Callable[[Model], Any]:
    def wrap(model: Model) -> Any:
        for module in (*model.layers, model):
            getattr(engine, kind)(module)
        return lambda: None

    return wrap


def by_hand(model: Model) -> Any:
    def average() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.detach() / dist.get_world_size()
            dist.all_reduce(parameter.grad)

    return average


def as_by_hand(rank: int, way: str, kind: str) -> None:
    # Without a head the first gradients of all come from the inner backward.
    for has_head in (True, False) if way in ("around", "tiled") else (True,):
        engines = {"ours": by_units(ours(), kind)}
        if way not in NOT_TORCHS:
            engines["torch's"] = by_units(TORCH, kind)
        expected = trained(rank, way, by_hand, has_head, hooks_run_once=False)
        for name, wrap in engines.items():
            actual = trained(rank, way, wrap, has_head, hooks_run_once=way not in IN_FORWARD)
            for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
                what = f"{name}, {way}, {kind}, head {has_head}, tensor {index}"
                if way in IN_PARTS:  # each part may be summed by itself
                    torch.testing.assert_close(one, other, msg=lambda text, what=what: f"{what}: {text}")
                else:
                    assert torch.equal(one, other), what


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_backwards_inside_a_backward_bring_gradients(way, kind):
    run_ranks(2, as_by_hand, way, kind, timeout=60)
