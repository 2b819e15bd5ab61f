"""What process groups the engine makes does not depend on when a rank's models are collected."""

from __future__ import annotations

import gc
from typing import Any

import torch
from models import batch, mlp
from pool import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise


def trained(step: int, rank: int, mesh: DeviceMesh | None, again: int | bool) -> Any:
    model = mlp(4, 4, 2)
    for module in (model[0], model):
        shardwise.fully_shard(module, mesh=mesh, reshard_after_forward=again)
    model(batch(step, rank, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return model


def some_ranks_keep_their_models(rank: int, axes: int) -> None:
    again = 2 if axes == 0 else True
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) if axes else None
    kept = []
    for step in range(4):
        model = trained(step, rank, mesh, again)
        if rank == step:
            kept.append(model)
        del model
        if rank == 3:
            gc.collect()
    assert kept
    torch.distributed.barrier()


class TestInteropMeshes:
    test_some_ranks_keep_their_models = on_ranks(4, some_ranks_keep_their_models, each=[0, 2], timeout=100)
