"""fully_shard(): models without memory, and state dicts that come and go."""

from __future__ import annotations

import copy

import torch
from models import batch, mlp, reference_backward
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.testing import run_ranks

WHOLE = StateDictOptions(full_state_dict=True)


def sharded(model: nn.Sequential) -> nn.Sequential:
    shardwise.fully_shard(model[0])
    return shardwise.fully_shard(model)


def train(model: nn.Module, reference: nn.Module, rank: int, steps: range) -> None:
    mine, theirs = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, reference))
    for step in steps:
        mine.zero_grad()
        theirs.zero_grad()
        model(batch(step, rank, 5)).pow(2).mean().backward()
        reference_backward(2, lambda r, s=step: reference(batch(s, r, 5)).pow(2).mean())
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(p, DTensor) and isinstance(p.grad, DTensor), name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"gradient of {name} at step {step}")
        mine.step()
        theirs.step()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(p, DTensor)
            torch.testing.assert_close(p.full_tensor(), q.detach(), msg=f"{name} after step {step}")


def from_the_meta_device(rank: int) -> None:
    reference = mlp(5, 7, 3)
    values = copy.deepcopy(reference.state_dict())
    with torch.device("meta"):
        model = mlp(5, 7, 3)
    sharded(model)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    set_model_state_dict(model, values, options=WHOLE)
    train(model, reference, rank, range(4))


def loaded_by_assignment(rank: int) -> None:
    reference = mlp(5, 7, 3)
    model = sharded(copy.deepcopy(reference))
    train(model, reference, rank, range(3))
    other = sharded(mlp(5, 7, 3))
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    train(other, reference, rank, range(3, 6))
    whole = get_model_state_dict(other, options=WHOLE)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(whole[name], value, msg=name)


class TestFullyShardState:
    def test_from_the_meta_device(self) -> None:
        run_ranks(2, from_the_meta_device)

    def test_loaded_by_assignment(self) -> None:
        run_ranks(2, loaded_by_assignment)
