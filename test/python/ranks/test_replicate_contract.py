"""replicate(): what it does besides averaging. The same rows as test/cpp/ranks/replicate_contract_test.cpp."""

from __future__ import annotations

import copy
import gc
import json
import weakref

import pytest
import torch
import torch.distributed as dist
from models import assert_same, batch, counters, local, mlp, pair, reference_backward
from pool import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise


def a_failed_backward_is_forgotten(rank: int) -> None:
    # T12: the first backward dies after some gradients came; the next is right, and .grad was left as it was.
    ours, reference = pair(mlp(3, 4, 4, 2))
    ours(batch(0, rank, 3)).pow(2).sum().backward()
    reference_backward(dist.get_world_size(), lambda r: reference(batch(0, r, 3)).pow(2).sum())
    # Parts of it are called, which no hook of its own sees.
    ours.unshard()  # type: ignore[operator]
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
    # T13: post-accumulate hooks see the mean, whenever they were registered; tensor hooks of the full parameter see the
    # local gradient.
    model = mlp(3, 4, 2)
    seen: list[tuple[str, torch.Tensor]] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("before", p.grad.clone())))
    reference = copy.deepcopy(model)
    seen.clear()
    shardwise.replicate(model)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.clone())))
    model.unshard()
    model[0].bias.register_hook(lambda gradient: gradient * 2)
    model.reshard()
    reference[0].bias.register_hook(lambda gradient: gradient * 2)
    reference[0].weight._post_accumulate_grad_hooks = None
    for step in range(3):
        seen.clear()
        model(batch(step, rank, 3)).sum().backward()
        reference_backward(dist.get_world_size(), lambda r, s=step: reference(batch(s, r, 3)).sum())
        assert_same(model, reference, f"step {step}")
        assert sorted(when for when, _ in seen) == ["after", "before"]
        by_time = dict(seen)
        torch.testing.assert_close(local(by_time["before"]), reference[0].weight.grad)
        torch.testing.assert_close(local(by_time["after"]), reference[2].weight.grad)
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
            lambda r, s=step: (
                references[1](references[0](batch(s + 5, r, 2))).sum()
                + references[0].get_parameter("0.bias").sum()
                + references[1].get_parameter("0.bias").sum()
            ),
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
    torch.testing.assert_close(local(model[0].weight.grad), reference[0].weight.grad)
    model.to(torch.float64)


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
    with pytest.raises(shardwise.Error, match=r"'weight' float32 .*rank 0.*'weight' float64 .*rank 1"):
        shardwise.replicate(nn.Linear(3, 3) if rank == 0 else nn.Linear(3, 3).double())
    with pytest.raises(shardwise.Error, match=r"frozen on rank 1"):
        shardwise.replicate(nn.Linear(3, 3).requires_grad_(rank == 0))
    with pytest.raises(shardwise.Error, match=r"'weight' float32 \[3, 3\] on rank 0, but 'weight' float32 \[3, 2\]"):
        shardwise.replicate(nn.Linear(3 if rank == 0 else 2, 3))


def misuse_is_an_error(rank: int) -> None:
    model = mlp(3, 4, 2)
    shardwise.replicate(model)
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        shardwise.replicate(model)
    with pytest.raises(
        ValueError, match="a part of a unit that also has parameters outside of it.*Wrap inner modules before"
    ):
        shardwise.replicate(model[0])
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="do not implement forward"):
        shardwise.replicate(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(TypeError, match="expects an nn.Module"):
        shardwise.replicate(3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="was called on this Linear"):
        shardwise.plan(nn.Linear(2, 2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    model.load_state_dict(state, assign=True)
    assert not any(value.is_meta for value in model.state_dict().values())
    table = shardwise.replicate(nn.Embedding(4, 3, sparse=True))
    with pytest.raises(RuntimeError, match=r"gradient of 'weight' has layout Sparse.*sparse=False"):
        table(torch.tensor([1, 2])).sum().backward()


def a_replaced_parameter_is_an_error(rank: int) -> None:
    model = shardwise.replicate(mlp(3, 4, 2))
    model[0].weight = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="'0.weight' that was wrapped is gone"):
        model(batch(0, rank, 3)).sum().backward()


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


class TestReplicateContract:
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

    def test_a_deleted_model_is_freed(self) -> None:
        run_ranks(2, a_deleted_model_is_freed)

    def test_different_modules_are_an_error(self) -> None:
        run_ranks(2, different_modules_are_an_error)

    def test_misuse_is_an_error(self) -> None:
        run_ranks(1, misuse_is_an_error)

    def test_a_replaced_parameter_is_an_error(self) -> None:
        run_ranks(2, a_replaced_parameter_is_an_error)

    def test_world_of_one_issues_no_collective(self) -> None:
        run_ranks(1, world_of_one_issues_no_collective)

    def test_plan_and_counters(self) -> None:
        run_ranks(2, plan_and_counters)
