"""replicate(): gradients are the mean over ranks. The same rows as test/cpp/ranks/replicate_gradients_test.cpp."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.distributed as dist
from models import Branches, assert_same, batch, counters, local, mlp, pair, reference_backward
from pool import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise


def parity_with_a_single_process(rank: int, widths: tuple[int, ...]) -> None:
    ours, reference = pair(mlp(*widths))
    mine, theirs = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (ours, reference))
    for step in range(10):
        mine.zero_grad()
        theirs.zero_grad()
        ours(batch(step, rank, widths[0])).pow(2).mean().backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: reference(batch(s, r, widths[0])).pow(2).mean())
        assert_same(ours, reference, f"step {step} before the optimizer")
        mine.step()
        theirs.step()
        assert_same(ours, reference, f"step {step}")


def inner_units(rank: int) -> None:
    model = mlp(4, 6, 5, 3)
    reference = copy.deepcopy(model)
    shardwise.replicate(model[0])
    shardwise.replicate(model[2])
    assert shardwise.replicate(model) is model
    names = [(unit["name"], unit["groups"][0]["parameters"]) for unit in shardwise.plan(model).units]
    assert names == [("0", 2), ("2", 2), ("", 2)], names
    for step in range(3):
        model(batch(step, rank, 4)).sum().backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: reference(batch(s, r, 4)).sum())
        assert_same(model, reference, f"step {step}")
    assert counters(model)["all_reduces"] == 3 * 3, counters(model)


def unused_on_some_ranks(rank: int) -> None:
    # T01-T03: each rank uses other branches, in another order; one branch is used nowhere in the last step.
    world = dist.get_world_size()
    uses = [
        [["left", "right"], ["right", "left"], ["right"]],
        [["left"], ["right"], []],
        [["left"], ["left"], ["left"]],
    ]
    ours, reference = pair(Branches())
    shardwise_inner = counters(ours)["all_reduces"]
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, reference))
    for step, use in enumerate(uses):
        mine.zero_grad()
        theirs.zero_grad()
        ours(batch(step, rank, 3), use[rank % 3]).sum().backward()
        reference_backward(world, lambda r, s=step, u=use: reference(batch(s, r, 3), u[r % 3]).sum())
        assert_same(ours, reference, f"step {step}")
        mine.step()
        theirs.step()
        assert_same(ours, reference, f"step {step} after the optimizer")
    assert ours.get_parameter("right.weight").grad is None
    assert counters(ours)["all_reduces"] == shardwise_inner + len(uses)


def order_of_arrival_does_not_matter(rank: int) -> None:
    # T01: units become ready in another order on each rank; without a canonical order sums of equal shapes mix.
    model = Branches()
    reference = copy.deepcopy(model)
    for inner in (model.left, model.right):
        shardwise.replicate(inner)
    shardwise.replicate(model)
    order = ["left", "right"] if rank % 2 == 0 else ["right", "left"]
    for step in range(3):
        model(batch(step, rank, 3), order).sum().backward()
        reference_backward(
            dist.get_world_size(),
            lambda r, s=step: reference(batch(s, r, 3), ["left", "right"] if r % 2 == 0 else ["right", "left"]).sum(),
        )
        assert_same(model, reference, f"step {step}")


def gradient_accumulation(rank: int) -> None:
    # R09, R15: three microbatches of unequal size a step, averaged at the last only; six steps.
    ours, reference = pair(mlp(3, 5, 2))
    assert isinstance(ours, shardwise.ReplicateModule)
    mine, theirs = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (ours, reference))
    for step in range(6):
        mine.zero_grad()
        theirs.zero_grad()
        for part in range(3):
            ours.set_requires_gradient_sync(part == 2)
            ours(batch(3 * step + part, rank, 3, rows=2 + part)).pow(2).sum().backward()
            reference_backward(
                dist.get_world_size(),
                lambda r, k=3 * step + part, n=2 + part: reference(batch(k, r, 3, rows=n)).pow(2).sum(),
            )
            if part < 2:
                assert all(p.grad is None for p in ours.parameters()), "what is not averaged is out of sight"
        assert_same(ours, reference, f"step {step}")
        mine.step()
        theirs.step()
    assert counters(ours)["all_reduces"] == 6


def random_flags(rank: int) -> None:
    # R10, R16: the flag is set at random, before forward or between forward and backward.
    ours, reference = pair(mlp(3, 4, 2))
    assert isinstance(ours, shardwise.ReplicateModule)
    choose = random.Random(3)
    waiting = copy.deepcopy(reference)
    for step in range(50):
        sync, early, reset = choose.random() < 0.5, choose.random() < 0.5, choose.random() < 0.3
        if reset:
            ours.zero_grad()
            reference.zero_grad()
        if early:
            ours.set_requires_gradient_sync(sync)
        loss = ours(batch(step, rank, 3)).pow(2).sum()
        ours.set_requires_gradient_sync(sync)
        loss.backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: waiting(batch(s, r, 3)).pow(2).sum())
        if sync:
            for seen, local in zip(reference.parameters(), waiting.parameters(), strict=True):
                assert local.grad is not None
                seen.grad = local.grad if seen.grad is None else seen.grad + local.grad
                local.grad = None
        assert_same(ours, reference, f"step {step}")


def adds_to_gradients_that_are_there(rank: int) -> None:
    ours, reference = pair(mlp(3, 4, 2))
    for step in range(4):
        ours(batch(step, rank, 3)).pow(2).sum().backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: reference(batch(s, r, 3)).pow(2).sum())
        assert_same(ours, reference, f"step {step}")
    for set_to_none in (False, True, False, False):
        ours.zero_grad(set_to_none=set_to_none)
        reference.zero_grad(set_to_none=set_to_none)
        ours(batch(9, rank, 3)).pow(2).sum().backward()
        reference_backward(dist.get_world_size(), lambda r: reference(batch(9, r, 3)).pow(2).sum())
        assert_same(ours, reference, f"set_to_none={set_to_none}")
    assert counters(ours)["allocations"] <= 2, counters(ours)


def shared_parameters(rank: int) -> None:
    model = mlp(4, 4, 4)
    model[2].weight = model[0].weight
    ours, reference = pair(model)
    for step in range(3):
        ours(batch(step, rank, 4)).pow(2).sum().backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: reference(batch(s, r, 4)).pow(2).sum())
        assert_same(ours, reference, f"step {step}")
    assert shardwise.plan(ours).units[0]["groups"][0]["parameters"] == 3


def frozen_then_unfrozen(rank: int) -> None:
    model = mlp(3, 4, 2)
    model[0].weight.requires_grad_(False)
    ours, reference = pair(model)
    for step in range(4):
        for each in (ours, reference):
            each.zero_grad()
            each.get_parameter("0.weight").requires_grad_(step >= 1)
            each.get_parameter("2.bias").requires_grad_(step < 3)
        ours(batch(step, rank, 3)).sum().backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: reference(batch(s, r, 3)).sum())
        assert_same(ours, reference, f"step {step}")


def to_float64_after_wrapping(rank: int) -> None:
    ours, reference = pair(mlp(3, 4, 2))
    for step in range(3):
        if step == 1:
            ours.to(torch.float64)
            reference.to(torch.float64)
        kind = torch.float64 if step else torch.float32
        for each in (ours, reference):
            each.zero_grad()
        ours(batch(step, rank, 3).to(kind)).pow(2).sum().backward()
        reference_backward(
            dist.get_world_size(), lambda r, s=step, k=kind: reference(batch(s, r, 3).to(k)).pow(2).sum()
        )
        assert_same(ours, reference, f"step {step}")
        assert all(p.grad is not None and p.grad.dtype == kind for p in ours.parameters())


def mixed_dtypes(rank: int) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.narrow, self.wide = nn.Linear(3, 2), nn.Linear(2, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.narrow(x).double())

    ours, reference = pair(Both())
    assert [g["dtype"] for g in shardwise.plan(ours).units[0]["groups"]] == ["float32", "float64"]
    for step in range(3):
        ours(batch(step, rank, 3)).sum().backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: reference(batch(s, r, 3)).sum())
        assert_same(ours, reference, f"step {step}")


def memory_format_is_kept(rank: int) -> None:
    torch.manual_seed(0)
    ours, reference = pair(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    images = [torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]
    for step in range(3):
        ours(images[rank]).sum().backward()
        reference_backward(dist.get_world_size(), lambda r: reference(images[r]).sum())
        assert_same(ours, reference, f"step {step}")
        gradient = ours.get_parameter("weight").grad
        assert gradient is not None and local(gradient).is_contiguous(memory_format=torch.channels_last)


def parity_with_ddp(rank: int) -> None:
    # Bit for bit at two ranks, over ten steps.
    ours = mlp(5, 8, 7, 3)
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    for inner in (ours[0], ours[2]):
        shardwise.replicate(inner)
    shardwise.replicate(ours)
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
    @pytest.mark.parametrize("world_size", [2, 3])
    @pytest.mark.parametrize("widths", [(4, 6, 2), (3, 5, 7, 1)])
    def test_parity_with_a_single_process(self, world_size: int, widths: tuple[int, ...]) -> None:
        run_ranks(world_size, parity_with_a_single_process, widths)

    def test_inner_units(self) -> None:
        run_ranks(2, inner_units)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_unused_on_some_ranks(self, world_size: int) -> None:
        run_ranks(world_size, unused_on_some_ranks)

    def test_order_of_arrival_does_not_matter(self) -> None:
        run_ranks(2, order_of_arrival_does_not_matter)

    def test_gradient_accumulation(self) -> None:
        run_ranks(2, gradient_accumulation)

    def test_random_flags(self) -> None:
        run_ranks(2, random_flags)

    def test_adds_to_gradients_that_are_there(self) -> None:
        run_ranks(2, adds_to_gradients_that_are_there)

    def test_shared_parameters(self) -> None:
        run_ranks(2, shared_parameters)

    def test_frozen_then_unfrozen(self) -> None:
        run_ranks(2, frozen_then_unfrozen)

    def test_to_float64_after_wrapping(self) -> None:
        run_ranks(2, to_float64_after_wrapping)

    def test_mixed_dtypes(self) -> None:
        run_ranks(2, mixed_dtypes)

    def test_memory_format_is_kept(self) -> None:
        run_ranks(2, memory_format_is_kept)

    def test_parity_with_ddp(self) -> None:
        run_ranks(2, parity_with_ddp)
