"""Steps that set_local_optimizers() leaves as they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from engine import TORCH, Engine
from local_steps import Make, advance, assert_same_state, assert_same_values, automatic, both_ways, counted, wrapped
from models import local
from pool import on_ranks
from test_interop_optimizers import optimizer
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OwnName(SGD):
    """Nobody knows what it may do."""


class OwnStep(SGD):
    """Looks at what it holds."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            assert all(type(p) is DTensor for p in group["params"])
        return super().step(closure)


Change = Callable[[Optimizer], None]


def replicated_state(one: Optimizer) -> None:
    for entry in one.state.values():
        entry["exp_avg"] = entry["exp_avg"].redistribute(placements=[Replicate()])


def rate_on_the_mesh(one: Optimizer) -> None:
    mesh = one.param_groups[0]["params"][0].device_mesh
    one.param_groups[0]["lr"] = distribute_tensor(torch.tensor(0.05), mesh, [Replicate()])


def with_other(placement: Placement, shape: tuple[int, ...]) -> Change:
    """A DTensor that no unit has, in a group of its own, with a new gradient for each step."""

    def change(one: Optimizer) -> None:
        mesh = one.param_groups[0]["params"][0].device_mesh
        if len(one.param_groups) == 1:
            value = DTensor.from_local(torch.ones(shape), mesh, [placement])
            one.add_param_group({"params": [nn.Parameter(value)]})
        (other,) = one.param_groups[1]["params"]
        other.grad = DTensor.from_local(torch.full(shape, 0.5), mesh, [placement])

    return change


def steps_as_before(rank: int) -> None:
    """What cannot be done locally, or whose result is not known to be the same."""

    def program(make: Make, change: Change | None = None, engine: Engine | None = None) -> tuple[Any, Optimizer]:
        model = wrapped(engine=engine)
        one = make(model)
        for step in range(3):
            advance(model, one, step, rank)
            if change is not None:
                change(one)
        return model, one

    simple = optimizer(Adam, eps=0.1, foreach=False)
    cases: list[tuple[int, Callable[[], tuple[Any, Optimizer]]]] = [
        (0, lambda: program(optimizer(OwnName, momentum=0.9))),
        (0, lambda: program(optimizer(OwnStep, momentum=0.9))),
        (0, lambda: program(simple, engine=TORCH)),
        # From the second step on.
        (1, lambda: program(simple, rate_on_the_mesh)),
        (1, lambda: program(simple, with_other(Replicate(), ()))),
        (1, lambda: program(optimizer(SGD, foreach=False), with_other(Partial(), (3,)))),
        (3, lambda: program(simple, with_other(Shard(0), (3,)))),
    ]
    if torch.__version__ < "2.12":
        cases.append((1, lambda: program(simple, replicated_state)))
    else:  # torch refuses such a state, and so do we
        for begin in (automatic, counted):
            with begin(), pytest.raises(RuntimeError, match="in-place operations that require placement changes"):
                program(simple, replicated_state)
    for count, case in cases:
        (mine, its), (usual, others) = both_ways(case, count)
        assert_same_values([mine, usual])
        assert not torch.equal(local(next(mine.parameters())), local(next(wrapped().parameters())))
        for group, other in zip(its.param_groups, others.param_groups, strict=True):
            for a, b in zip(group["params"], other["params"], strict=True):
                assert torch.equal(local(a), local(b)), a
        if its.state:
            assert_same_state(its, others)


def other_peoples_step(rank: int) -> None:
    # Somebody put a function of his own around torch's, below what calls the hooks: it sees what the optimizer holds.
    SGD([torch.ones(1)])
    usual: Any = SGD.step
    seen: list[SGD] = []

    @functools.wraps(inspect.unwrap(usual))
    def around(self: SGD, closure: Any = None) -> Any:
        seen.append(self)
        return usual.__wrapped__(self, closure)

    model = wrapped()
    with mock.patch.object(SGD, "step", around):
        one = SGD(model.parameters(), lr=0.05)
        with automatic() as steps:
            for step in range(3):
                advance(model, one, step, rank)
    assert seen == [one] * 3 and steps == []
    # A hook that gives the step other arguments is obeyed.
    handle = register_optimizer_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 5.0), {}))
    with automatic() as steps:
        assert one.step() == 5.0
    handle.remove()
    assert steps == []
    # Gradients go through a differentiable step: here through a write to a leaf, which torch refuses.
    for begin in (automatic, counted):
        model = wrapped()
        with begin() as steps, pytest.raises(RuntimeError, match="leaf Variable"):
            advance(model, Adam(model.parameters(), differentiable=True), 0, rank)
        assert steps == []


class TestAutomaticExceptions:
    test_what_steps_as_before = on_ranks(2, steps_as_before)
    test_steps_of_others = on_ranks(2, other_peoples_step)
