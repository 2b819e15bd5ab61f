"""How a parameter lies on the ranks, as the DTensors that stand for it say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwise import _C

Mesh = DataParallelMeshInfo


@dataclass(frozen=True)
class Leaf:
    """What a module computes with: the full parameter, and the tensor inside of it where it is a DTensor."""

    full: nn.Parameter
    memory: torch.Tensor | None
    #: The values of `full` if it is of another dtype; this rank's shard where there is an extension.
    values: torch.Tensor | None
    #: Gives what is inside of a gradient that arrives at such a DTensor.
    to_memory: Callable[[torch.Tensor], torch.Tensor] | None
    spec: DTensorSpec
    shard_dim: int
    #: Post-accumulate hooks of the parameter that was wrapped.
    hooks: Any
    #: It travels in its own way, and the leaf that counts is yet to be made.
    extended: bool = False

    def around(self, shard: torch.Tensor) -> nn.Parameter:
        """The parameter that the optimizer sees, around this rank's shard."""
        inner = DTensor(shard.detach() if shard.requires_grad else shard, self.spec, requires_grad=False)
        parameter = nn.Parameter(inner, requires_grad=self.full.requires_grad)
        parameter._post_accumulate_grad_hooks = self.hooks
        return parameter


def leaf_of(parameter: nn.Parameter, mesh: Mesh, shard: Shard, kind: torch.dtype | None) -> Leaf:
    """A leaf for `parameter`, which is left as it is. `kind` is what its module computes in."""
    hooks = parameter._post_accumulate_grad_hooks
    spec = _spec_of(parameter, mesh, shard)
    if not isinstance(parameter, DTensor):
        full = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        return Leaf(full, None, None, None, spec, shard.dim, hooks)
    detached = parameter.detach()
    values = None
    is_cast = kind is not None and parameter.is_floating_point() and parameter.dtype != kind
    if is_cast or parameter.is_meta:
        values = cast(DTensor, detached)._local_tensor
        # A DTensor's dtype and device are for good.
        detached = DTensor(_cast_or_hollow(values, kind, mesh), parameter._spec, requires_grad=False)
    full = nn.Parameter(detached, requires_grad=parameter.requires_grad)
    memory = cast(DTensor, full)._local_tensor
    return Leaf(full, memory, values, partial(_memory_of, parameter._spec), spec, shard.dim, hooks)


def extended_leaf_of(parameter: nn.Parameter, own: torch.Tensor, mesh: Mesh, shard: Shard, kind: torch.dtype) -> Leaf:
    """The same for a parameter whose extension makes the leaf: until then one without memory. `own` is the shard."""
    empty = torch.empty(local_of(parameter).size(), dtype=kind, device="meta")
    full = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    to_memory = partial(_memory_of, parameter._spec) if isinstance(parameter, DTensor) else None
    hooks = parameter._post_accumulate_grad_hooks
    return Leaf(full, None, own, to_memory, _spec_of(parameter, mesh, shard), shard.dim, hooks, extended=True)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter before data parallelism cuts it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _cast_or_hollow(values: torch.Tensor, kind: torch.dtype | None, mesh: Mesh) -> torch.Tensor:
    """Of meta values something on the device that will have them, without memory: the unit gives it some."""
    if not values.is_meta:
        return values.to(kind)
    kind = kind if kind is not None and values.is_floating_point() else values.dtype
    return _C.hollow(values.size(), kind, _get_device_from_mesh(_mesh_of(mesh)))


def _spec_of(parameter: nn.Parameter, mesh: Mesh, shard: Shard) -> DTensorSpec:
    if isinstance(parameter, DTensor):
        return _combined(parameter, mesh, shard)
    meta = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype)
    return DTensorSpec(_mesh_of(mesh), _placements(mesh, shard), tensor_meta=meta)


def _memory_of(spec: DTensorSpec, gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, placed as its parameter is, and there."""
    if not isinstance(gradient, DTensor):
        return gradient
    local = gradient._local_tensor
    if gradient._spec.placements != spec.placements:
        local = redistribute_local_tensor(local, gradient._spec, spec)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _mesh_of(mesh: Mesh) -> DeviceMesh:
    assert mesh.mesh is not None
    return mesh.mesh


def _placements(mesh: Mesh, shard: Placement) -> tuple[Placement, ...]:
    if isinstance(mesh, HSDPMeshInfo):
        return (Replicate(), shard)
    return (shard,) if isinstance(mesh, FSDPMeshInfo) else (Replicate(),)


def _combined(parameter: DTensor, mesh: Mesh, shard: Shard) -> DTensorSpec:
    """For a parameter that tensor parallelism has cut already: the axes of data parallelism come first."""
    inner = parameter._spec
    if len(inner.placements) > 2:
        raise NotImplementedError(
            f"shardwise: FSDP only supports 1D TP/EP or 2D EP+TP, not {inner.placements}. "
            "Distribute the parameter over at most two axes of its own."
        )
    split = inner.num_shards_map[shard.dim]
    outer = _StridedShard(shard.dim, split_factor=split) if split > 1 else shard
    whole = DeviceMesh._concatenate([_mesh_of(mesh), inner.mesh])
    return DTensorSpec(whole, (*_placements(mesh, outer), *inner.placements), tensor_meta=inner.tensor_meta)
