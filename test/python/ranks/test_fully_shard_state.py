"""fully_shard(): models without memory, and state dicts that come and go."""

from __future__ import annotations

import copy

import pytest
import torch
from models import batch, local, mlp, reference_backward
from pool import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise

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


def copied(rank: int) -> None:
    """Each shard begins its storage, though all lie in one vector: a DTensor with an offset cannot be deep-copied."""
    reference = mlp(5, 1, 3)
    model = sharded(copy.deepcopy(reference))
    for kind in (torch.float32, torch.float64):
        model, reference = model.to(kind), reference.to(kind)
        saved = copy.deepcopy(model.state_dict())
        before = {name: value.clone() for name, value in reference.state_dict().items()}
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            storage = parameter.to_local().untyped_storage()
            assert storage.nbytes() == parameter.to_local().nbytes, "who saves a shard saves its storage"
        with torch.no_grad():
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(2)
        for (name, copied), value in zip(saved.items(), model.state_dict().values(), strict=True):
            assert torch.equal(copied.full_tensor(), before[name]), name
            assert torch.equal(value.full_tensor(), 2 * before[name]), name
    model, reference = model.float(), reference.float()
    train(model, reference, rank, range(3))
    model.load_state_dict(saved)
    reference.load_state_dict(before)
    train(model, reference, rank, range(3))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def tensor_parallel_from_the_meta_device(rank: int, kind: torch.dtype | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    policy = MixedPrecisionPolicy(param_dtype=kind)
    torch.manual_seed(5)
    values = Pair().state_dict()
    models = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Pair()
        if device == "cpu":
            model.load_state_dict(values)
        parallelize_module(model, mesh["tp"], plan)
        shardwise.fully_shard(model.up, mesh=mesh["dp"], mp_policy=policy)
        shardwise.fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        models.append(model)
    usual, from_meta = models
    from_meta.to_empty(device="cpu")
    set_model_state_dict(from_meta, values, options=WHOLE)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(step, rank // 2, 4)).pow(2).mean().backward()
            optimizer.step()
        for (name, p), q in zip(usual.named_parameters(), from_meta.parameters(), strict=True):
            assert torch.equal(local(p), local(q)), f"{name} after step {step}"


class TestFullyShardState:
    @pytest.mark.parametrize("kind", [None, torch.bfloat16])
    def test_tensor_parallelism_from_the_meta_device(self, kind: torch.dtype | None) -> None:
        run_ranks(4, tensor_parallel_from_the_meta_device, kind)

    def test_copied(self) -> None:
        run_ranks(2, copied)

    def test_from_the_meta_device(self) -> None:
        run_ranks(2, from_the_meta_device)

    def test_loaded_by_assignment(self) -> None:
        run_ranks(2, loaded_by_assignment)
