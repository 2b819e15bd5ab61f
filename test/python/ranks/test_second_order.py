"""Gradients of gradients: what docs/limits.md says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Layer, batch, whole
from pool import run_ranks
from torch import Tensor, nn

import shardwise

WIDTH = 6


def slope(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Within(Layer):
    """Takes a gradient of its own output."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + slope(y, x)


class Model(nn.Sequential):
    """With `forces`, its forward takes a gradient through its units."""

    forces = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + slope(y, x) if self.forces else y


def within(model: Model, x: Tensor) -> None:
    model(x).pow(2).mean().backward()


def with_a_graph(model: Model, x: Tensor) -> None:
    model(x).pow(2).mean().backward(create_graph=True)


def penalty(model: Model, x: Tensor) -> None:
    y = model(x)
    (y.pow(2).mean() + slope(y, x).pow(2).sum()).backward()


def forces(model: Model, x: Tensor) -> None:
    model.forces = True
    model(x).pow(2).mean().backward()


WAYS: dict[str, tuple[type[Layer], Callable[[Model, Tensor], None]]] = {
    "within a unit": (Within, within),
    "backward(create_graph=True)": (Layer, with_a_graph),
    "through units": (Layer, penalty),
    "through units, in the forward of the one around them": (Layer, forces),
}


def train(model: Model, act: Callable[[Model, Tensor], None], rank: int, average: bool) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        act(model, batch(step, rank, WIDTH).requires_grad_())
        for module in model.modules():
            if isinstance(module, shardwise.FSDPModule):
                module.reshard()
        for parameter in model.parameters():
            assert parameter.grad is not None
            if average:
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
            seen.append(whole(parameter.grad).clone())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def made(layer: type[Layer]) -> Model:
    torch.manual_seed(4)
    return Model(layer(WIDTH, WIDTH), layer(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def assert_refused(model: Model, act: Callable[[Model, Tensor], None], rank: int) -> None:
    text = r"the full parameter '.*' was read while it is freed.*create_graph=True.*set_reshard_after_backward"
    with pytest.raises(RuntimeError, match=text):
        train(model, act, rank, False)
    model.reset_iter_state()
    model.zero_grad()
    model.forces = False
    both = zip(train(model, within, rank, False), train(made(Layer), within, rank, True), strict=True)
    for one, other in both:
        torch.testing.assert_close(one, other)


def second_order(rank: int, kind: str, way: str, stays_in_forward: bool, stays: bool) -> None:
    layer, act = WAYS[way]
    model: Any = made(layer)
    for module in (*model, model):
        getattr(shardwise, kind)(module)
    if stays_in_forward:
        model.set_reshard_after_forward(False)
    if stays:
        model.set_reshard_after_backward(False)
    elif kind == "fully_shard" and act in (penalty, forces):
        assert_refused(model, act, rank)
        return
    for one, other in zip(train(model, act, rank, False), train(made(layer), act, rank, True), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_gradients_of_gradients(kind, way):
    settings = ((False, False), (True, False), (True, True)) if kind == "fully_shard" else ((False, False),)
    for stays_in_forward, stays in settings:
        run_ranks(2, second_order, kind, way, stays_in_forward, stays)
