"""What a program took from its parameters after a load, a cast or to_empty() is the memory that trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from models import batch, local, mlp, reference_backward
from pool import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

import shardwise

Wrap = Callable[[nn.Sequential], nn.Module]


def sharded(model: nn.Sequential) -> nn.Module:
    shardwise.fully_shard(model[0])
    return shardwise.fully_shard(model)


def kept(model: nn.Sequential) -> nn.Module:
    return shardwise.fully_shard(model, reshard_after_forward=False)


def replicated(model: nn.Sequential) -> nn.Module:
    return shardwise.replicate(model)


WRAPS = (sharded, kept, replicated)


class Held:
    """Everything that a program may take once and rely on, without any use of the units."""

    def __init__(self, model: nn.Module) -> None:
        self.taken = {
            "state_dict()": model.state_dict(),
            "get_model_state_dict()": get_model_state_dict(model),
            "detach()": {name: p.detach() for name, p in model.named_parameters()},
            "local": {name: local(p) for name, p in model.named_parameters()},
            "a view": {name: local(p).view(-1) for name, p in model.named_parameters()},
        }

    def pairs(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        parameters = dict(model.named_parameters())
        for how, values in self.taken.items():
            for name, value in values.items():
                yield f"{how} of {name}", local(value), local(parameters[name])

    def check(self, model: nn.Module, when: str) -> None:
        for what, held, now in self.pairs(model):
            assert torch.equal(held.view(-1), now.view(-1)), f"{when}: {what}"
            assert held.data_ptr() == now.data_ptr(), f"{when}: {what}"


def train(model: nn.Module, reference: nn.Module, rank: int, steps: range, held: Held) -> None:
    kind = next(reference.parameters()).dtype
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, reference))
    for step in steps:
        mine.zero_grad()
        theirs.zero_grad()
        model(batch(step, rank, 5).to(kind)).pow(2).mean().backward()
        reference_backward(2, lambda r, s=step: reference(batch(s, r, 5).to(kind)).pow(2).mean())
        mine.step()
        theirs.step()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            whole = p.full_tensor() if isinstance(p, DTensor) else p.detach()
            torch.testing.assert_close(whole, q.detach(), msg=f"{name} after step {step}")
        held.check(model, f"after step {step}")


def train_held(model: nn.Module, reference: nn.Module, rank: int) -> None:
    held = Held(model)
    train(model, reference, rank, range(3), held)
    with torch.no_grad():
        for name, value in held.taken["local"].items():
            value.mul_(0.5)
            reference.get_parameter(name).mul_(0.5)
    train(model, reference, rank, range(3, 5), held)


def after_to_empty(rank: int, wrap: Wrap) -> None:
    reference = mlp(5, 7, 3)
    with torch.device("meta"):
        model = mlp(5, 7, 3)
    wrap(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            whole = torch.distributed.tensor.distribute_tensor(q.detach(), p.device_mesh, p.placements)
            p.copy_(whole)
            assert torch.equal(p.full_tensor(), q), name
    train_held(model, reference, rank)


def after_a_cast(rank: int, wrap: Wrap) -> None:
    reference = mlp(5, 7, 3)
    model = copy.deepcopy(reference)
    wrap(model)
    for kind in (torch.float64, torch.float32):
        model.to(kind)
        reference.to(kind)
        train_held(model, reference, rank)
    # A part of a unit alone: nobody hears of it.
    model[2].double().float()
    train_held(model, reference, rank)


def after_a_load(rank: int, wrap: Wrap) -> None:
    reference = mlp(5, 7, 3)
    model = copy.deepcopy(reference)
    wrap(model)
    other = mlp(5, 7, 3)
    wrap(other)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    other.load_state_dict(values, assign=True)
    train_held(other, reference, rank)


def after_a_cast_of_full_parameters(rank: int, wrap: Wrap) -> None:
    """What is done to a part of a module while it shows full parameters would be lost: it is said, and undone."""
    reference = mlp(5, 7, 3)
    model = copy.deepcopy(reference)
    wrap(model)
    last: nn.Linear = model[2]
    for spoil in (last.double, lambda: setattr(last.weight, "data", torch.zeros(3, 7))):
        with torch.no_grad():
            model(batch(9, rank, 5))
        assert not isinstance(last.weight, DTensor)
        spoil()
        with pytest.raises(
            shardwise.Error, match=rf"rank {rank}: .* replaced the memory of the full parameter '2.weight'"
        ):
            model(batch(9, rank, 5))
        held = Held(model)
        train(model, reference, rank, range(3), held)
    # Once the module shows what trains, a part of it may be cast.
    with torch.no_grad():
        model(batch(9, rank, 5))
    model.reshard()  # type: ignore[operator]
    last.double().float()
    train_held(model, reference, rank)


class TestHeldTensors:
    def test_after_a_cast_of_full_parameters(self) -> None:
        for wrap in WRAPS:
            run_ranks(2, after_a_cast_of_full_parameters, wrap)

    def test_after_to_empty(self) -> None:
        for wrap in WRAPS:
            run_ranks(2, after_to_empty, wrap)

    def test_after_a_cast(self) -> None:
        for wrap in WRAPS:
            run_ranks(2, after_a_cast, wrap)

    def test_after_a_load(self) -> None:
        for wrap in WRAPS:
            run_ranks(2, after_a_load, wrap)
