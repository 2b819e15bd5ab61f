"""shard_placement_fn gives parameters of one call meshes of their own: experts, which differ between ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from engine import TORCH, Engine, ours
from experts import WIDTH, Layer, layers, spread_experts
from models import Beside, batch, mlp, train_alike
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

import shardwise
from shardwise import ShardPlacementResult
from shardwise._state import unit_of

WORLD = 4
HAS_TORCHS = hasattr(_fsdp_common, "ShardPlacementResult")


@dataclass(frozen=True)
class Meshes:
    """All ranks for the dense layers; two experts' ranks beside each other."""

    dense: DeviceMesh
    experts: FSDPMeshInfo
    expert_axis: DeviceMesh


def meshes() -> Meshes:
    experts = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("efsdp", "ep"))
    dense = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    return Meshes(dense, FSDPMeshInfo(experts["efsdp"], shard_mesh_dim=0), experts["ep"])


def placement(model: nn.Module, info: FSDPMeshInfo, kind: Any = ShardPlacementResult) -> Callable[..., Any]:
    experts = {each for layer in model.modules() if isinstance(layer, Layer) for each in layer.experts.parameters()}
    return lambda parameter: kind(Shard(1) if parameter.ndim == 3 else None, info) if parameter in experts else None


def wrap(engine: Engine, model: nn.Sequential, on: Meshes, **options: Any) -> None:
    spread_experts(model, on.expert_axis)
    choose = placement(model, on.experts)
    for layer in model:
        if isinstance(layer, Layer):
            engine.fully_shard(layer, mesh=on.dense, shard_placement_fn=choose, **options)
    engine.fully_shard(model, mesh=on.dense, **options)
    each: Any
    for each in model.modules():
        if isinstance(each, Layer):
            # An expert's gradient comes from the rows of all ranks.
            each.set_gradient_divide_factor(WORLD)
            each.set_force_sum_reduction_for_comms(True)  # Gloo has no other division by a factor.


def trains(rank: int, options: dict[str, Any]) -> None:
    on = meshes()
    reference = layers()
    engines = [ours(), *([TORCH] if HAS_TORCHS else [])]
    models = [layers() for _ in engines]
    for engine, model in zip(engines, models, strict=True):
        wrap(engine, model, on, **options)

    def backward(model: nn.Module, step: int, part: int) -> None:
        model(batch(step, part, WIDTH)).pow(2).mean().backward()

    adam = partial(torch.optim.AdamW, lr=0.02, eps=1e-16, foreach=False)
    train_alike(models, reference, backward, (rank, WORLD), adam)
    for name, parameter in models[0].named_parameters():
        assert isinstance(parameter, DTensor)
        assert ("efsdp" in (parameter.device_mesh.mesh_dim_names or ())) == ("experts" in name), name


OPTIONS: dict[str, dict[str, Any]] = {
    "freed": {},
    "two ranks hold all": {"reshard_after_forward": 2},
}


class TestFullyShardNDTraining:
    test_shard_placement_fn_tp_ep = on_ranks(WORLD, trains, each=OPTIONS)


def one_unit(rank: int) -> None:
    """Both meshes' parameters are gathered, freed, named and told of settings as one unit's, with own collectives."""
    on = meshes()
    model: Any = layers(1)
    wrap(ours(), model, on, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    layer = model[0]
    state = layer._get_fsdp_state()
    experts, dense = state._fsdp_param_groups
    assert experts.mesh_info is on.experts and dense.mesh_info.mesh == on.dense
    assert [experts.is_sharded, dense.is_sharded] == [True, True]
    handle = layer.unshard(async_op=True)
    handle.wait()
    assert [experts.is_unsharded, dense.is_unsharded] == [True, True]
    assert layer.experts.up.to_local().shape == (2, 6, 8) and layer.experts.up.dtype == torch.bfloat16
    layer.reshard()
    assert [experts.is_sharded, dense.is_sharded] == [True, True]
    plan = json.loads(shardwise.plan(model).json())
    units = [(unit["name"], unit["axes"][0]["name"], unit["reshard"]) for unit in plan["units"]]
    assert units == [("0", "efsdp", "after forward"), ("0", "dp", "after forward"), ("", "dp", "after backward")]
    before = unit_of(model).counters()
    model(batch(0, rank, WIDTH)).sum().backward()
    after = unit_of(model).counters()
    # The layer's two parts forward and backward, and the root's once.
    assert after["all_gathers"] - before["all_gathers"] == 5
    assert after["reduce_scatters"] - before["reduce_scatters"] == 3
    for group in (experts, dense):
        calls: list[torch.Tensor] = []
        layer.set_all_reduce_hook(calls.append)
        model(batch(0, rank, WIDTH)).sum().backward()
        assert len(calls) == 2
        assert group.unit.requires_gradient_sync()
    layer.set_requires_gradient_sync(False, recurse=False)
    assert not experts.unit.requires_gradient_sync() and not dense.unit.requires_gradient_sync()


def refused(rank: int) -> None:
    on = meshes()

    def expect(kind: type[Exception], text: str, choose: Callable[..., Any], **options: Any) -> None:
        model = mlp(6, 4)
        with pytest.raises(kind, match=text):
            shardwise.fully_shard(model, **{"mesh": on.dense, "shard_placement_fn": choose, **options})
        assert not isinstance(model, shardwise.FSDPModule)
        assert isinstance(shardwise.fully_shard(model, mesh=on.dense), shardwise.FSDPModule)

    def two(parameter: torch.Tensor) -> Any:
        return ShardPlacementResult(None, FSDPMeshInfo(on.experts.mesh, shard_mesh_dim=0))

    expect(ValueError, "must use the same FSDPMeshInfo object, but .* '0.bias' another one than '0.weight'", two)
    expect(ValueError, "Invalid shard_placement_fn result: 0 for '0.weight'", lambda _: 0)
    expect(
        TypeError,
        "'0.weight' a ShardPlacementResult whose mesh_info is DeviceMesh",
        lambda _: ShardPlacementResult(None, on.dense),
    )  # type: ignore[arg-type]
    expect(
        NotImplementedError,
        r"uneven sharding on dim 1: '0.weight' has torch.Size\(\[4, 6\]\) \(world size: 4\)",
        lambda each: Shard(each.ndim - 1),
    )
    whole = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("copies",))
    copies = shardwise.DataParallelMeshDims(replicate="copies")
    expect(ValueError, "not supported with DDPMeshInfo", two, mesh=whole, dp_mesh_dims=copies)
    with pytest.raises(NotImplementedError, match="'0.weight' a mesh of its own, which an estimate does"):
        shardwise.estimate_memory(mlp(6, 4), WORLD, shard_placement_fn=two)


def all_elsewhere(rank: int) -> None:
    """No parameter is left for the mesh of the call."""
    on = meshes()

    def wrap(model: nn.Module) -> None:
        ours().fully_shard(model, mesh=on.dense, shard_placement_fn=lambda _: ShardPlacementResult(None, on.experts))

    def loss(model: nn.Module, step: int, part: int) -> torch.Tensor:
        return model(batch(step, 2 * part + rank % 2, 6)).sum()

    Beside(mlp(6, 4), wrap, loss, place=(rank // 2, WORLD // 2)).train(range(3))


class TestShardPlacement:
    test_one_unit = on_ranks(WORLD, one_unit)
    test_refused = on_ranks(WORLD, refused)
    test_all_elsewhere = on_ranks(WORLD, all_elsewhere)
