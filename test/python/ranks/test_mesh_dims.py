"""dp_mesh_dims: parameters are DTensors on a mesh of all kinds of parallelism, and some of its axes are for data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from engine import TORCH, Engine, ours
from models import Beside, batch, mlp, train_alike
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import shardwise
from shardwise import DataParallelMeshDims, _parameters
from shardwise._spmd_types import Annotated

WIDTHS = (6, 8, 5)
HAS_TORCHS = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


@dataclass(frozen=True)
class Case:
    """A mesh with its axes' names, those for data, and how each dimension of the first layer's output is cut."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    shard: str | tuple[str, ...] | None = None
    replicate: str | None = None
    #: The names of the axes that a shard's placements have.
    spread: tuple[str, ...] = ()
    #: How many shards there are of a parameter that tensor parallelism does not cut.
    shards: int = 2
    with_replicate: bool = False

    @property
    def dims(self) -> Any:
        return DataParallelMeshDims(shard=self.shard, replicate=self.replicate)

    @property
    def data(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name != "tp")


CASES = {
    "shard beside tp": Case((2, 2), ("dp", "tp"), shard="dp", spread=("dp", "tp")),
    "shard and copies": Case((2, 2), ("host", "dp"), shard="dp", replicate="host", spread=("host", "dp")),
    "copies alone": Case((2, 2), ("host", "tp"), replicate="host", spread=("host", "tp"), shards=1),
    "replicate()": Case((2, 2), ("host", "tp"), replicate="host", spread=("host", "tp"), shards=1, with_replicate=True),
    "two axes as one": Case((2, 2), ("dp", "cp"), shard=("dp", "cp"), spread=("dp_cp",), shards=4),
}


def distribute(model: nn.Sequential, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Puts all parameters on the mesh: the first layer is cut by columns along tp, the last one by rows."""
    cuts: dict[str, Placement] = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}
    for name, parameter in list(model.named_parameters()):
        placements = [cuts.get(name, Replicate()) if axis == "tp" else Replicate() for axis in names]
        layer, _, kind = name.partition(".")
        setattr(model[int(layer)], kind, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))


def data_rank(mesh: DeviceMesh, case: Case) -> tuple[int, int]:
    """This rank's number among those with other data, and how many these are."""
    ranks = mesh[case.data].mesh.flatten().tolist()
    return ranks.index(dist.get_rank()), len(ranks)


def wrap(engine: Engine, model: nn.Sequential, mesh: DeviceMesh, case: Case) -> None:
    function = engine.replicate if case.with_replicate else engine.fully_shard
    for layer in (model[0], model[2], model):
        function(layer, mesh=mesh, dp_mesh_dims=case.dims)


def trains(rank: int, case: Case) -> None:
    mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=case.names)
    number, count = data_rank(mesh, case)
    reference, models = mlp(*WIDTHS), []
    for engine in (ours(), *([TORCH] if HAS_TORCHS else [])):
        model = mlp(*WIDTHS)
        distribute(model, mesh, case.names)
        wrap(engine, model, mesh, case)
        models.append(model)

    def loss(model: nn.Module, step: int, part: int) -> torch.Tensor:
        x = batch(step, part, WIDTHS[0])
        if model is reference:
            return model(x).pow(2).mean()
        placements = [Replicate() if axis == "tp" else Shard(0) for axis in case.names]
        out = model(DTensor.from_local(x, mesh, placements, run_check=False))
        return out.redistribute(placements=placements).to_local().pow(2).mean()

    adam = partial(torch.optim.AdamW, lr=0.05)
    train_alike(models, reference, lambda *what: loss(*what).backward(), (number, count), adam)
    for name, parameter in models[0].named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh_dim_names == case.spread, name
    bias: Any = models[0].get_parameter("2.bias")
    assert bias.to_local().numel() <= -(-WIDTHS[2] // case.shards)


class OwnColumns(nn.Module):
    """Tensor parallelism by hand, of plain parameters: some rows of a weight, behind a vector that all ranks have."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        whole = mlp(*WIDTHS)
        weight, scale = whole[0].weight.detach(), whole[2].weight.detach()[0, : WIDTHS[0]]
        self.weight = nn.Parameter(weight.chunk(2)[mesh["tp"].get_local_rank()] if mesh else weight)
        self.scale = nn.Parameter(scale.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x * self.scale, self.weight)


def annotated(rank: int) -> None:
    """Plain parameters with annotations of spmd_types, whose words are put in its mouth: tests run without it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    says = {
        "weight": ((Replicate(), Shard(0)), (Partial(), Shard(0))),
        "scale": ((Replicate(), Replicate()), (Partial(), Partial())),
    }

    def read(parameter: nn.Parameter, name: str, _mesh: Any) -> Annotated:
        placements, gradient = says[name]
        dtensor = DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)
        return Annotated(dtensor, gradient, annotate=lambda full: None)

    def wrap(model: nn.Module) -> None:
        with mock.patch.object(_parameters, "annotated", read):
            shardwise.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))

    def loss(model: Any, step: int, rank: int) -> torch.Tensor:
        return model(batch(step, rank // 2, WIDTHS[0])).pow(2).sum()

    Beside(OwnColumns(mesh), wrap, loss, plain=OwnColumns()).train(range(2))


def refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    shard = DataParallelMeshDims(shard="dp")

    def layer(*placements: Placement, on: DeviceMesh = mesh) -> nn.Linear:
        made = nn.Linear(4, 4, bias=False)
        made.weight = nn.Parameter(distribute_tensor(made.weight.detach(), on, placements))
        return made

    def expect(kind: type[Exception], text: str, module: nn.Module, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            shardwise.fully_shard(module, **{"mesh": mesh, "dp_mesh_dims": shard, **options})
        assert not isinstance(module, shardwise.FSDPModule)

    good = layer(Replicate(), Shard(0))
    expect(
        ValueError, "must be DTensors on the full SPMD mesh .* Got plain tensor for parameter 'weight'", nn.Linear(4, 4)
    )
    expect(
        ValueError,
        r"Expected Replicate\(\) on DP shard dim 'dp' \(index 0\) but got .* 'weight'",
        layer(Shard(0), Replicate()),
    )
    expect(ValueError, "same mesh passed to fully_shard", layer(Replicate(), on=mesh["dp"]))
    expect(ValueError, "Mesh dim name 'pp' not found", good, dp_mesh_dims=DataParallelMeshDims(shard="pp"))
    expect(ValueError, "names the axis 'dp' twice", good, dp_mesh_dims=DataParallelMeshDims("dp", "dp"))
    expect(ValueError, "must have mesh_dim_names", good, mesh=init_device_mesh("cpu", (2,)))
    expect(NotImplementedError, "reshard_after_forward as int", good, reshard_after_forward=1)
    expect(TypeError, "dp_mesh_dims must be a DataParallelMeshDims", good, dp_mesh_dims="dp")
    for wrong in (shard, DataParallelMeshDims(shard="tp", replicate="dp")):
        with pytest.raises(ValueError, match="requires replicate-only dims"):
            shardwise.replicate(good, mesh=mesh, dp_mesh_dims=wrong)
    with pytest.raises(ValueError, match="at least one of shard"):
        shardwise._mesh_dims._DataParallelMeshDims()
    shardwise.fully_shard(good, mesh=mesh, dp_mesh_dims=shard)


class TestMeshDims:
    test_training = on_ranks(4, trains, each=CASES)
    test_annotated = on_ranks(4, annotated)
    test_refused = on_ranks(2, refused)
