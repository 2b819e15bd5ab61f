"""replicate(): what it does besides averaging. The same rows as test/cpp/ranks/replicate_contract_test.cpp."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from typing import Any

import pytest
import torch
from models import Beside, batch, counters, local, mean_square, mlp, reference_backward, whole
from pool import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise


def a_failed_backward_is_forgotten(rank: int) -> None:
    # T12: the first backward dies after some gradients came; the next is right, and .grad was left as it was.
    both = Beside(mlp(3, 4, 4, 2), shardwise.replicate)
    both.backward(0)
    # Parts of it are called, which no hook of its own sees.
    both.model.unshard()
    hidden = both.model[:2](batch(1, rank, 3))

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        both.model[2:](hidden).sum().backward()
    both.check("after the failure")
    both.backward(2)
    both.check("the next backward")


def users_hooks(rank: int) -> None:
    # T13: post-accumulate hooks see the mean, whenever they were registered; tensor hooks of the full parameter see the
    # local gradient.
    model, plain = mlp(3, 4, 2), mlp(3, 4, 2)
    seen: list[tuple[str, torch.Tensor]] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("0.weight", p.grad.clone())))
    both = Beside(model, shardwise.replicate, plain=plain)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("2.weight", p.grad.clone())))
    both.model.unshard()
    for each in (model, plain):
        each[0].bias.register_hook(lambda gradient: gradient * 2)
    both.model.reshard()
    for step in range(3):
        seen.clear()
        both.backward(step)
        assert sorted(name for name, _ in seen) == ["0.weight", "2.weight"]
        for name, gradient in seen:
            torch.testing.assert_close(local(gradient), plain.get_parameter(name).grad)
        both.step(f"step {step}")


def two_models_in_one_backward(rank: int) -> None:
    # T34: a generator is trained through a discriminator; each then also alone. Arrival orders differ by rank.
    makers = [mlp(2, 4, 3), mlp(3, 4, 1)]
    references = copy.deepcopy(makers)
    make, judge = (shardwise.replicate(m) for m in makers)

    def alone(makes: Any, judges: Any, step: int, r: int) -> torch.Tensor:
        return judges(makes(batch(step, r, 2)).detach()).sum()

    def together(makes: Any, judges: Any, step: int, r: int) -> torch.Tensor:
        loss = judges(makes(batch(step + 5, r, 2))).sum()
        first, second = (makes, judges) if r % 2 else (judges, makes)
        return loss + (first.get_parameter("0.bias").sum() + second.get_parameter("0.bias").sum())

    for step in range(3):
        for loss in (alone, together):
            loss(make, judge, step, rank).backward()
            reference_backward(2, lambda r, s=step, loss=loss: loss(*references, s, r))
        for model, reference in zip((make, judge), references, strict=True):
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(whole(p.grad), q.grad, msg=f"step {step}")
    assert counters(make)["all_reduces"] == 3 and counters(judge)["all_reduces"] == 6


def several_backwards_of_one_graph(rank: int) -> None:
    both = Beside(mlp(3, 4, 2), shardwise.replicate)
    loss = mean_square(both.model, 0, rank)
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        reference_backward(2, lambda r: mean_square(both.plain, 0, r))
    both.check("retain_graph")
    before = counters(both.model)["all_reduces"]
    inputs = batch(1, rank, 3).requires_grad_()
    mine, theirs = (
        torch.autograd.grad(each(inputs).sum(), [inputs, *each.parameters()]) for each in (both.model, both.plain)
    )
    torch.testing.assert_close(mine, theirs)
    both.check("autograd.grad leaves .grad alone")
    assert counters(both.model)["all_reduces"] == before, "autograd.grad averages nothing"
    both.model(inputs).sum().backward(inputs=[inputs, both.model[2].weight])
    for r in range(2):
        (both.plain(batch(1, r, 3)).sum() / 2).backward(inputs=[both.plain[2].weight])
    both.check("backward(inputs)")


def reentrant_checkpoint(rank: int) -> None:
    # T11: the shared layer's gradient arrives in an inner backward of each checkpoint, and in the outer one.
    def loss(model: nn.Module, step: int, r: int) -> torch.Tensor:
        x = model(batch(step, r, 4).requires_grad_())
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=True)
        return x.pow(2).sum()

    Beside(mlp(4, 4, 4), shardwise.replicate, loss).train(range(3))


def ignored_parameters(rank: int) -> None:
    model = mlp(3, 4, 2)
    reference = copy.deepcopy(model)
    shardwise.replicate(model, ignored_params={model[0].bias})
    for each in (model, reference):
        mean_square(each, 0, rank).backward()
    torch.testing.assert_close(model[0].bias.grad, reference[0].bias.grad)
    reference.zero_grad()
    reference_backward(2, lambda r: mean_square(reference, 0, r))
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

    class Named(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for text, module in (
        (
            r"(?s)wrap different modules.*'b.weight'.*rank 0.*'a.weight'.*rank 1",
            Named({"ba"[rank]: first, "ab"[rank]: second}),
        ),
        (r"'weight' float32 .*rank 0.*'weight' float64 .*rank 1", nn.Linear(3, 3, dtype=[None, torch.double][rank])),
        (r"frozen on rank 1", nn.Linear(3, 3).requires_grad_(rank == 0)),
        (r"'weight' float32 \[3, 3\] on rank 0, but 'weight' float32 \[3, 2\]", nn.Linear(3 - rank, 3)),
    ):
        with pytest.raises(shardwise.Error, match=text):
            shardwise.replicate(module)


def misuse_is_an_error(rank: int) -> None:
    # More of it is in test_misuse.py.
    model = shardwise.replicate(mlp(3, 4, 2))
    with pytest.raises(
        ValueError, match="a unit has parameters both inside and outside this module.*Wrap inner modules"
    ):
        shardwise.replicate(model[0])
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
    with pytest.raises(RuntimeError, match="the wrapped parameter '0.weight' is gone"):
        model(batch(0, rank, 3)).sum().backward()


def world_of_one_issues_no_collective(rank: int) -> None:
    both = Beside(mlp(3, 4, 2), shardwise.replicate)
    both.train(range(3))
    used = counters(both.model)
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
    test_a_failed_backward_is_forgotten = on_ranks(2, a_failed_backward_is_forgotten)
    test_users_hooks = on_ranks(2, users_hooks)
    test_two_models_in_one_backward = on_ranks(2, two_models_in_one_backward)
    test_several_backwards_of_one_graph = on_ranks(2, several_backwards_of_one_graph)
    test_reentrant_checkpoint = on_ranks(2, reentrant_checkpoint)
    test_ignored_parameters = on_ranks(2, ignored_parameters)
    test_a_deleted_model_is_freed = on_ranks(2, a_deleted_model_is_freed)
    test_different_modules_are_an_error = on_ranks(2, different_modules_are_an_error)
    test_misuse_is_an_error = on_ranks(1, misuse_is_an_error)
    test_a_replaced_parameter_is_an_error = on_ranks(2, a_replaced_parameter_is_an_error)
    test_world_of_one_issues_no_collective = on_ranks(1, world_of_one_issues_no_collective)
    test_plan_and_counters = on_ranks(2, plan_and_counters)
