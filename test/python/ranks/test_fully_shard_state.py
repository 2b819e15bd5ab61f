"""fully_shard(): what is taken from a state dict, and tensor parallelism on models without memory."""

from __future__ import annotations

import copy

import torch
from models import Beside, Layer, batch, local, mlp, step_all
from pool import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise


def sharded(model: nn.Sequential) -> None:
    for module in (model[0], model):
        shardwise.fully_shard(module)


def copied(rank: int) -> None:
    """Each shard begins its storage, though all lie in one vector: a DTensor with an offset cannot be deep-copied."""
    both = Beside(mlp(5, 1, 3), sharded)
    for kind in (torch.float32, torch.float64, torch.float32):
        model, plain = both.model.to(kind), both.plain.to(kind)
        saved = copy.deepcopy(model.state_dict())
        before = {name: value.clone() for name, value in plain.state_dict().items()}
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            storage = parameter.to_local().untyped_storage()
            assert storage.nbytes() == parameter.to_local().nbytes, "who saves a shard saves its storage"
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(2)
        for (name, copied), value in zip(saved.items(), model.state_dict().values(), strict=True):
            assert torch.equal(copied.full_tensor(), before[name]), name
            assert torch.equal(value.full_tensor(), 2 * before[name]), name
    both.train(range(3))
    model.load_state_dict(saved)
    plain.load_state_dict(before)
    both.train(range(3))


def tensor_parallel_from_the_meta_device(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    torch.manual_seed(5)
    values = Layer(4, 8).state_dict()
    models = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Layer(4, 8)
        if device == "cpu":
            model.load_state_dict(values)
        parallelize_module(model, mesh["tp"], plan)
        for module in (model.up, model):
            shardwise.fully_shard(module, mesh=mesh["dp"])
        models.append(model)
    usual, from_meta = models
    from_meta.to_empty(device="cpu")
    set_model_state_dict(from_meta, values, options=StateDictOptions(full_state_dict=True))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    for step in range(4):
        for model in models:
            model(batch(step, rank // 2, 4)).pow(2).mean().backward()
        step_all(optimizers)
        for (name, p), q in zip(usual.named_parameters(), from_meta.parameters(), strict=True):
            assert torch.equal(local(p), local(q)), f"{name} after step {step}"


class TestFullyShardState:
    test_tensor_parallelism_from_the_meta_device = on_ranks(4, tensor_parallel_from_the_meta_device)
    test_copied = on_ranks(2, copied)
