"""install() makes local steps of programs for torch's functions, of the shape that trainers give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import Engine, ours
from layouts import by_layer
from local_steps import ADAM, Make, advance, assert_same_state, assert_same_values, both_ways, counted, wrapped
from models import batch, local, mlp
from parity import momentum
from pool import run_ranks
from test_interop_optimizers import WIDTHS, copy_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import shardwise
from shardwise.testing import run_ranks as run_new_ranks


class AsAccelerate:
    """What accelerate's prepare() makes of an optimizer from before its model was wrapped."""

    def __init__(self, one: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer, self.scaler, self.steps = one, scaler, 0
        self.usual = one.step
        one.load_state_dict(one.state_dict())

    def step(self) -> None:
        def patched(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return self.usual(*args, **kwargs)

        self.optimizer.step = patched  # type: ignore[method-assign]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.step = self.usual  # type: ignore[method-assign]


def prepared(engine: Engine, layout: str, make: Make) -> tuple[Any, AsAccelerate, LambdaLR]:
    """The optimizer and its schedule are made from the plain model; then its parameters are replaced."""
    model: Any = mlp(*WIDTHS)
    one = make(model)
    schedule = LambdaLR(one, lambda step: 1 / (1 + step))
    names = {p: name for name, p in model.named_parameters()}
    places = [[names[p] for p in group["params"]] for group in one.param_groups]
    for group in one.param_groups:
        group["params"] = [torch.empty(1) for _ in group["params"]]
    by_layer(layout)(engine, model)
    new = dict(model.named_parameters())
    for group, place in zip(one.param_groups, places, strict=True):
        group["params"] = [new[name] for name in place]
    return model, AsAccelerate(one, torch.amp.GradScaler("cpu", init_scale=8.0)), schedule


def decayed(model: nn.Module) -> Optimizer:
    """Two groups, as the Trainer makes them."""
    named = list(model.named_parameters())
    return AdamW(
        [
            {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.3},
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
        ],
        lr=0.05,
        eps=0.1,
    )


def accelerated(rank: int, layout: str, make: Make) -> None:
    """Accumulated gradients, clipping, a scaled loss, a schedule; saved and resumed in the middle."""

    def program() -> tuple[Any, AsAccelerate]:
        model, one, schedule = prepared(ours(), layout, make)
        for step in range(4):
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                loss = model(batch(2 * step + part, rank, WIDTHS[0])).pow(2).mean() / 2
                one.scaler.scale(loss).backward()
            one.scaler.unscale_(one.optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            one.step()
            schedule.step()
            model.zero_grad()
            if step == 1:
                state = get_optimizer_state_dict(model, one.optimizer)
                set_optimizer_state_dict(model, one.optimizer, optim_state_dict=copy_of(state))
        assert one.steps == 4
        return model, one

    mine, usual = both_ways(program, 4)
    assert_same_values([mine[0], usual[0]])
    assert_same_state(mine[1].optimizer, usual[1].optimizer)
    assert not torch.equal(local(next(mine[0].parameters())), local(next(wrapped(layout).parameters())))


def installed(rank: int) -> None:
    model = wrapped()
    one = ADAM(model)
    wanted = []
    for turn_on, turn_off in (
        (shardwise.install, shardwise.uninstall),
        (shardwise.install, lambda: shardwise.set_local_optimizers(False)),
    ):
        with counted() as steps:
            advance(model, one, 0, rank)
            turn_on()
            for step in range(3):
                advance(model, one, step, rank)
            turn_off()
            advance(model, one, 1, rank)
        shardwise.uninstall()
        wanted.append(len(steps))
    assert wanted == [3, 3]


class TestAutomaticPrograms:
    @pytest.mark.parametrize(("layout", "make"), [("fully_shard", momentum), ("replicate", decayed)])
    def test_a_program_of_a_trainers_shape(self, layout: str, make: Make) -> None:
        run_ranks(2, accelerated, layout, make)

    def test_install_turns_it_on(self) -> None:
        run_new_ranks(2, installed)
