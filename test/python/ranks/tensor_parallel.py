"""A stack of MLPs whose layers are cut along a tensor parallel dimension, as torch cuts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engine import Engine
from form import by_form
from models import batch
from parity import Program, Wrapping
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training_models import Mlp, mlps

#: Some of which two ranks cannot share evenly.
WIDTHS = by_form((3, 16), (3, 5, 16, 17))

MLPS = 3


def stack_program(width: int, steps: int) -> Program:
    return Program(
        lambda: mlps(width, MLPS),
        lambda model, number, rank: model(batch(number, rank, width)).pow(2).sum(),
        steps=steps,
    )


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> None:
    for mlp in model:
        assert isinstance(mlp, Mlp)
        parallelize_module(mlp, mesh, {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})


def on_mesh(tensor_mesh: DeviceMesh, checkpointed: bool, wrap: Callable[[Engine, Any], Any]) -> Wrapping:
    """Every MLP is a unit, and so is the stack."""

    def parallelize_and_wrap(engine: Engine, model: Any) -> None:
        parallelize(model, tensor_mesh)
        for mlp in model:
            if checkpointed:
                checkpoint(mlp)
            wrap(engine, mlp)
        wrap(engine, model)

    return Wrapping(parallelize_and_wrap)


def assert_on(mesh: DeviceMesh, names: tuple[str, ...], model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """Parameters and gradients are on the mesh of both kinds of parallelism, and are there entirely."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
        for tensor in (parameter, parameter.grad):
            assert tensor.device_mesh.mesh_dim_names == names, tensor.device_mesh
            assert tensor.device_mesh.ndim == len(tensor.placements) == len(names), name
            assert torch.equal(tensor.device_mesh.mesh, mesh.mesh), name
        torch.testing.assert_close(parameter.full_tensor().detach(), whole[name], rtol=1e-5, atol=1e-6)
