"""replicate(): gradients are the mean over ranks. The same rows as test/cpp/ranks/replicate_gradients_test.cpp."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from models import Beside, Branches, batch, counters, local, mean_square, mlp, reference_backward
from pool import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise


def parity_with_a_single_process(rank: int) -> None:
    Beside(mlp(3, 5, 7, 1), shardwise.replicate).train(range(10))


def with_inner_units(*names: str) -> Any:
    def wrap(model: nn.Module) -> None:
        for name in names:
            shardwise.replicate(model.get_submodule(name))
        assert shardwise.replicate(model) is model

    return wrap


def inner_units(rank: int) -> None:
    both = Beside(mlp(4, 6, 5, 3), with_inner_units("0", "2"))
    units = [(unit["name"], unit["groups"][0]["parameters"]) for unit in shardwise.plan(both.model).units]
    assert units == [("0", 2), ("2", 2), ("", 2)], units
    both.train(range(3))
    assert counters(both.model)["all_reduces"] == 3 * 3, counters(both.model)


def unused_on_some_ranks(rank: int) -> None:
    # T01-T03: each rank uses other branches, in another order; one branch is used nowhere in the last step.
    uses = [
        [["left", "right"], ["right", "left"], ["right"]],
        [["left"], ["right"], []],
        [["left"], ["left"], ["left"]],
    ]
    both = Beside(Branches(), shardwise.replicate, lambda model, step, r: model(batch(step, r, 3), uses[step][r]).sum())
    before = counters(both.model)["all_reduces"]
    for step in range(3):
        both.backward(step)
        assert (both.model.right.weight.grad is None) == (step == 2)
        both.step(f"step {step}")
    assert counters(both.model)["all_reduces"] == before + 3


def order_of_arrival_does_not_matter(rank: int) -> None:
    # T01: units become ready in another order on each rank; without a canonical order sums of equal shapes mix.
    def loss(model: Any, step: int, r: int) -> torch.Tensor:
        return model(batch(step, r, 3), ["left", "right"][:: 1 if r % 2 == 0 else -1]).sum()

    Beside(Branches(), with_inner_units("left", "right"), loss).train(range(3))


def gradient_accumulation(rank: int) -> None:
    # R09, R15: three microbatches of unequal size a step, averaged at the last only.
    both = Beside(mlp(3, 5, 2), shardwise.replicate, lambda model, k, r: model(batch(k, r, 3, 2 + k % 3)).pow(2).sum())
    for step in range(4):
        for part in range(3):
            both.model.set_requires_gradient_sync(part == 2)
            both.backward(3 * step + part)
            if part < 2:
                assert all(p.grad is None for p in both.model.parameters()), "what is not averaged is out of sight"
        both.step(f"step {step}")
    assert counters(both.model)["all_reduces"] == 4


def random_flags(rank: int) -> None:
    # R10, R16: the flag is set at random, before forward or between forward and backward.
    both = Beside(mlp(3, 4, 2), shardwise.replicate)
    waiting = copy.deepcopy(both.plain)
    choose = random.Random(3)
    for step in range(50):
        sync, early, reset = choose.random() < 0.5, choose.random() < 0.5, choose.random() < 0.3
        if reset:
            both.model.zero_grad()
            both.plain.zero_grad()
        if early:
            both.model.set_requires_gradient_sync(sync)
        loss = mean_square(both.model, step, rank)
        both.model.set_requires_gradient_sync(sync)
        loss.backward()
        reference_backward(2, lambda r, s=step: mean_square(waiting, s, r))
        if sync:
            for seen, more in zip(both.plain.parameters(), waiting.parameters(), strict=True):
                seen.grad = more.grad if seen.grad is None else seen.grad + more.grad
                more.grad = None
        both.check(f"step {step}")


def adds_to_gradients_that_are_there(rank: int) -> None:
    both = Beside(mlp(3, 4, 2), shardwise.replicate)
    for step in range(4):
        both.backward(step)
        both.check(f"step {step}")
    for set_to_none in (False, True, False, False):
        for each in (both.model, both.plain):
            each.zero_grad(set_to_none=set_to_none)
        both.backward(9)
        both.check(f"set_to_none={set_to_none}")
    assert counters(both.model)["allocations"] <= 2, counters(both.model)


def shared_parameters(rank: int) -> None:
    model = mlp(4, 4, 4)
    model[2].weight = model[0].weight
    both = Beside(model, shardwise.replicate)
    both.train(range(3))
    assert shardwise.plan(both.model).units[0]["groups"][0]["parameters"] == 3


def frozen_then_unfrozen(rank: int) -> None:
    model = mlp(3, 4, 2)
    model[0].weight.requires_grad_(False)
    both = Beside(model, shardwise.replicate)
    for step in range(4):
        for each in (both.model, both.plain):
            each[0].weight.requires_grad_(step >= 1)
            each[2].bias.requires_grad_(step < 3)
        both.train([step])


def to_float64_after_wrapping(rank: int) -> None:
    both = Beside(mlp(3, 4, 2), shardwise.replicate)
    both.train([0])
    for each in (both.model, both.plain):
        each.to(torch.float64)
    both.backward(1)
    assert all(p.grad.dtype == torch.float64 for p in both.model.parameters())
    both.check("in float64")


class Widening(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double())


def mixed_dtypes(rank: int) -> None:
    torch.manual_seed(1)
    both = Beside(nn.Sequential(nn.Linear(3, 2), Widening(2, 2).double()), shardwise.replicate)
    assert [g["dtype"] for g in shardwise.plan(both.model).units[0]["groups"]] == ["float32", "float64"]
    both.train(range(3))


def memory_format_is_kept(rank: int) -> None:
    def loss(model: Any, step: int, r: int) -> torch.Tensor:
        return model(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + r))).sum()

    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    both = Beside(model, shardwise.replicate, loss)
    for step in range(3):
        both.backward(step)
        assert local(both.model.weight.grad).is_contiguous(memory_format=torch.channels_last)
        both.step(f"step {step}")


def parity_with_ddp(rank: int) -> None:
    # Bit for bit at two ranks, over ten steps.
    ours = mlp(5, 8, 7, 3)
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with_inner_units("0", "2")(ours)
    mine, other = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (ours, theirs))
    for step in range(10):
        for model, optimizer in ((ours, mine), (theirs, other)):
            optimizer.zero_grad()
            model(batch(step, rank, 5)).pow(2).mean().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(local(a.grad), b.grad), f"gradients at step {step}"
        mine.step()
        other.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(local(a), b), f"values at step {step}"


class TestReplicateGradients:
    test_parity_with_a_single_process = on_ranks(2, parity_with_a_single_process)
    test_inner_units = on_ranks(2, inner_units)
    test_unused_on_some_ranks = on_ranks(3, unused_on_some_ranks)
    test_order_of_arrival_does_not_matter = on_ranks(2, order_of_arrival_does_not_matter)
    test_gradient_accumulation = on_ranks(2, gradient_accumulation)
    test_random_flags = on_ranks(2, random_flags)
    test_adds_to_gradients_that_are_there = on_ranks(2, adds_to_gradients_that_are_there)
    test_shared_parameters = on_ranks(2, shared_parameters)
    test_frozen_then_unfrozen = on_ranks(2, frozen_then_unfrozen)
    test_to_float64_after_wrapping = on_ranks(2, to_float64_after_wrapping)
    test_mixed_dtypes = on_ranks(2, mixed_dtypes)
    test_memory_format_is_kept = on_ranks(2, memory_format_is_kept)
    test_parity_with_ddp = on_ranks(2, parity_with_ddp)
