"""replicate(): the same rows as test/cpp/ranks/replicate_foundation_test.cpp, with the same names."""

from __future__ import annotations

import copy
import gc
import json
import random
import weakref

import pytest
import torch
import torch.distributed as dist
from models import Branches, assert_same, batch, mlp, reference_backward
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.testing import RankFailure, run_ranks


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A replicated model, and a copy of it that one process trains on the data of all ranks."""
    reference = copy.deepcopy(model)
    return shardwise.replicate(model), reference


def counters(model: nn.Module) -> dict[str, int]:
    return model.__dict__["_shardwise"].unit.counters()


def parity_with_a_single_process(rank: int, widths: tuple[int, ...]) -> None:
    ours, reference = pair(mlp(*widths))
    mine, theirs = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (ours, reference))
    for step in range(10):
        mine.zero_grad()
        theirs.zero_grad()
        ours(batch(step, rank, widths[0])).pow(2).mean().backward()
        reference_backward(
            dist.get_world_size(), lambda r, s=step: reference(batch(s, r, widths[0])).pow(2).mean()
        )
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
        reference_backward(
            world, lambda r, s=step, u=use: reference(batch(s, r, 3), u[r % 3]).sum()
        )
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
        reference_backward(dist.get_world_size(), lambda r, s=step, k=kind: reference(batch(s, r, 3).to(k)).pow(2).sum())
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
    assert [g["dtype"] for g in shardwise.plan(ours).units[0]["groups"]] == ["Float", "Double"]
    for step in range(3):
        ours(batch(step, rank, 3)).sum().backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: reference(batch(s, r, 3)).sum())
        assert_same(ours, reference, f"step {step}")


def a_failed_backward_is_forgotten(rank: int) -> None:
    # T12: the first backward dies after some gradients came; the next is right, and .grad was left as it was.
    ours, reference = pair(mlp(3, 4, 4, 2))
    ours(batch(0, rank, 3)).pow(2).sum().backward()
    reference_backward(dist.get_world_size(), lambda r: reference(batch(0, r, 3)).pow(2).sum())
    hidden = ours[:2](batch(1, rank, 3))

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        ours[2:](hidden).sum().backward()
    assert_same(ours, reference, "after the failure")
    ours(batch(2, rank, 3)).pow(2).sum().backward()
    reference_backward(dist.get_world_size(), lambda r: reference(batch(2, r, 3)).pow(2).sum())
    assert_same(ours, reference, "the next backward")


def users_hooks(rank: int) -> None:
    # T13: post-accumulate hooks see the mean, whenever they were registered; tensor hooks see the local gradient.
    model = mlp(3, 4, 2)
    seen: list[tuple[str, torch.Tensor]] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("before", p.grad.clone())))
    reference = copy.deepcopy(model)
    seen.clear()
    shardwise.replicate(model)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.clone())))
    model[0].bias.register_hook(lambda gradient: gradient * 2)
    reference[0].bias.register_hook(lambda gradient: gradient * 2)
    reference[0].weight._post_accumulate_grad_hooks = None
    for step in range(3):
        seen.clear()
        model(batch(step, rank, 3)).sum().backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: reference(batch(s, r, 3)).sum())
        assert_same(model, reference, f"step {step}")
        assert sorted(when for when, _ in seen) == ["after", "before"]
        by_time = dict(seen)
        torch.testing.assert_close(by_time["before"], reference[0].weight.grad)
        torch.testing.assert_close(by_time["after"], reference[2].weight.grad)
        model.zero_grad()
        reference.zero_grad()


def two_models_in_one_backward(rank: int) -> None:
    # T34: a generator is trained through a discriminator; each then also alone. Arrival orders differ by rank.
    makers = [mlp(2, 4, 3), mlp(3, 4, 1)]
    references = copy.deepcopy(makers)
    make, judge = (shardwise.replicate(m) for m in makers)
    world = dist.get_world_size()
    for step in range(3):
        judge(make(batch(step, rank, 2)).detach()).sum().backward()
        reference_backward(world, lambda r, s=step: references[1](references[0](batch(s, r, 2)).detach()).sum())
        first, second = (make, judge) if rank % 2 else (judge, make)
        loss = judge(make(batch(step + 5, rank, 2))).sum()
        extra = first.get_parameter("0.bias").sum() + second.get_parameter("0.bias").sum()
        (loss + extra).backward()
        reference_backward(
            world,
            lambda r, s=step: references[1](references[0](batch(s + 5, r, 2))).sum()
            + references[0].get_parameter("0.bias").sum()
            + references[1].get_parameter("0.bias").sum(),
        )
        assert_same(make, references[0], f"step {step}")
        assert_same(judge, references[1], f"step {step}")
    assert counters(make)["all_reduces"] == 3 and counters(judge)["all_reduces"] == 6


def several_backwards_of_one_graph(rank: int) -> None:
    ours, reference = pair(mlp(3, 4, 2))
    loss = ours(batch(0, rank, 3)).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        reference_backward(dist.get_world_size(), lambda r: reference(batch(0, r, 3)).pow(2).sum())
    assert_same(ours, reference, "retain_graph")
    before = counters(ours)["all_reduces"]
    inputs = batch(1, rank, 3).requires_grad_()
    gradients = torch.autograd.grad(ours(inputs).sum(), [inputs, *ours.parameters()])
    local = torch.autograd.grad(reference(inputs).sum(), [inputs, *reference.parameters()])
    torch.testing.assert_close(gradients, local)
    assert_same(ours, reference, "autograd.grad leaves .grad alone")
    assert counters(ours)["all_reduces"] == before, "autograd.grad averages nothing"
    ours(inputs).sum().backward(inputs=[inputs, ours.get_parameter("2.weight")])
    for r in range(dist.get_world_size()):
        (reference(batch(1, r, 3)).sum() / dist.get_world_size()).backward(inputs=[reference.get_parameter("2.weight")])
    assert_same(ours, reference, "backward(inputs)")


def reentrant_checkpoint(rank: int) -> None:
    # T11: the shared layer's gradient arrives in an inner backward of each checkpoint, and in the outer one.
    ours, reference = pair(mlp(4, 4, 4))

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = model(x.requires_grad_())
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=True)
        return x.pow(2).sum()

    for step in range(3):
        forward(ours, batch(step, rank, 4)).backward()
        for r in range(dist.get_world_size()):
            (forward(reference, batch(step, r, 4)) / dist.get_world_size()).backward()
        assert_same(ours, reference, f"step {step}")


def ignored_parameters(rank: int) -> None:
    model = mlp(3, 4, 2)
    reference = copy.deepcopy(model)
    shardwise.replicate(model, ignored_params={model[0].bias})
    model(batch(0, rank, 3)).sum().backward()
    reference(batch(0, rank, 3)).sum().backward()
    torch.testing.assert_close(model[0].bias.grad, reference[0].bias.grad)
    reference.zero_grad()
    reference_backward(dist.get_world_size(), lambda r: reference(batch(0, r, 3)).sum())
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad)
    model.to(torch.float64)


def memory_format_is_kept(rank: int) -> None:
    torch.manual_seed(0)
    ours, reference = pair(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    images = [torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]
    for step in range(3):
        ours(images[rank]).sum().backward()
        reference_backward(dist.get_world_size(), lambda r: reference(images[r]).sum())
        assert_same(ours, reference, f"step {step}")
        gradient = ours.get_parameter("weight").grad
        assert gradient is not None and gradient.is_contiguous(memory_format=torch.channels_last)


def a_deleted_model_is_freed(rank: int) -> None:
    # T23
    model = shardwise.replicate(mlp(3, 4, 2))
    model(batch(0, rank, 3)).sum().backward()
    alive = [weakref.ref(p) for p in model.parameters()]
    unit = weakref.ref(model)
    del model
    gc.collect()
    assert unit() is None and all(p() is None for p in alive)


def different_modules_are_an_error(rank: int) -> None:
    # Reliability 1.1, 7 and 8: equal shapes under other names, another dtype, frozen on one rank, another order.
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)

    def named(a: str, b: str) -> nn.ModuleDict:
        class Named(nn.ModuleDict):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        return Named({a: first, b: second})

    with pytest.raises(shardwise.Error, match=r"(?s)wrap different modules.*'b.weight'.*rank 0.*'a.weight'.*rank 1"):
        shardwise.replicate(named("b", "a") if rank == 0 else named("a", "b"))
    with pytest.raises(shardwise.Error, match=r"'weight' Float .*rank 0.*'weight' Double .*rank 1"):
        shardwise.replicate(nn.Linear(3, 3) if rank == 0 else nn.Linear(3, 3).double())
    with pytest.raises(shardwise.Error, match=r"frozen on rank 1"):
        shardwise.replicate(nn.Linear(3, 3).requires_grad_(rank == 0))
    with pytest.raises(shardwise.Error, match=r"'weight' Float \[3, 3\] on rank 0, but 'weight' Float \[3, 2\]"):
        shardwise.replicate(nn.Linear(3 if rank == 0 else 2, 3))


def misuse_is_an_error(rank: int) -> None:
    model = mlp(3, 4, 2)
    shardwise.replicate(model)
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        shardwise.replicate(model)
    with pytest.raises(ValueError, match="(?s)belong to a unit that reaches outside.*Wrap inner modules first"):
        shardwise.replicate(model[0])
    with pytest.raises(AssertionError, match="cannot be deep-copied"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="do not implement forward"):
        shardwise.replicate(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(TypeError, match="expects an nn.Module"):
        shardwise.replicate(3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="was not called on this Linear"):
        shardwise.plan(nn.Linear(2, 2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"(?s)'0.weight'.*were replaced by other tensors"):
        model.load_state_dict(state, assign=True)
    table = shardwise.replicate(nn.Embedding(4, 3, sparse=True))
    with pytest.raises(RuntimeError, match=r"gradient of 'weight' has layout Sparse.*sparse=False"):
        table(torch.tensor([1, 2])).sum().backward()


def a_replaced_parameter_is_an_error(rank: int) -> None:
    model = shardwise.replicate(mlp(3, 4, 2))
    model[0].weight = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="'0.weight' that was wrapped is gone"):
        model(batch(0, rank, 3)).sum().backward()


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
            assert torch.equal(a.grad, b.grad), f"gradients at step {step}"  # type: ignore[arg-type]
        mine.step()
        other.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), f"values at step {step}"


def world_of_one_issues_no_collective(rank: int) -> None:
    ours, reference = pair(mlp(3, 4, 2))
    for step in range(3):
        ours(batch(step, rank, 3)).sum().backward()
        reference(batch(step, rank, 3)).sum().backward()
        assert_same(ours, reference, f"step {step}")
    used = counters(ours)
    assert used["all_reduces"] == used["all_gathers"] == used["broadcasts"] == 0, used


def plan_and_counters(rank: int) -> None:
    model = shardwise.replicate(mlp(4, 8, 2))
    plan = shardwise.plan(model)
    (group,) = plan.units[0]["groups"]
    elements = 4 * 8 + 8 + 8 * 2 + 2
    assert group["elements"] == elements and group["bytes"] == 4 * elements
    assert str(elements) in str(plan) and "replicate" in str(plan)
    json.dumps(plan.units)
    for step in range(4):
        model.zero_grad()
        model(batch(step, rank, 4)).sum().backward()
    used = counters(model)
    assert used["backwards"] == used["all_reduces"] == 4
    assert used["copied_bytes"] == 4 * group["bytes"], "each gradient is copied once a step"
    assert used["allocations"] == 1
    gathered = 16  # the fingerprint of the structure
    assert used["collective_bytes"] == 4 * group["bucket_bytes"] + gathered


class TestReplicateFoundation:
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

    def test_a_failed_backward_is_forgotten(self) -> None:
        run_ranks(2, a_failed_backward_is_forgotten)

    def test_users_hooks(self) -> None:
        run_ranks(2, users_hooks)

    def test_two_models_in_one_backward(self) -> None:
        run_ranks(2, two_models_in_one_backward)

    def test_several_backwards_of_one_graph(self) -> None:
        run_ranks(2, several_backwards_of_one_graph)

    def test_reentrant_checkpoint(self) -> None:
        run_ranks(2, reentrant_checkpoint)

    def test_ignored_parameters(self) -> None:
        run_ranks(2, ignored_parameters)

    def test_memory_format_is_kept(self) -> None:
        run_ranks(2, memory_format_is_kept)

    def test_a_deleted_model_is_freed(self) -> None:
        run_ranks(2, a_deleted_model_is_freed)

    def test_different_modules_are_an_error(self) -> None:
        run_ranks(2, different_modules_are_an_error)

    def test_misuse_is_an_error(self) -> None:
        run_ranks(1, misuse_is_an_error)

    def test_a_replaced_parameter_is_an_error(self) -> None:
        run_ranks(2, a_replaced_parameter_is_an_error)

    def test_parity_with_ddp(self) -> None:
        run_ranks(2, parity_with_ddp)

    def test_world_of_one_issues_no_collective(self) -> None:
        run_ranks(1, world_of_one_issues_no_collective)

    def test_plan_and_counters(self) -> None:
        run_ranks(2, plan_and_counters)


def test_failure_is_reported() -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2 failed"):
        run_ranks(2, fail_on_rank_one)


def fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")
    dist.barrier()
