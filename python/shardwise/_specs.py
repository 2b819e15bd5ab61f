"""For each parameter: what its module computes with, and the DTensor spec of how it is spread over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
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
from shardwise._mesh_dims import spec_of, whole_mesh
from shardwise._spmd_types import Annotated
from shardwise._torch_versions import own_grad_dtype

MeshInfo = DataParallelMeshInfo


@dataclass(frozen=True)
class Leaf:
    """What a module computes with: the full parameter and, if that is a DTensor, the tensor inside it."""

    full: nn.Parameter
    memory: torch.Tensor | None
    #: The values for `full`, if they have another dtype or come later; this rank's shard if it is `extended`.
    values: torch.Tensor | None
    #: If `full` is a DTensor, or annotated like one: converts its gradient into the one for `memory`.
    to_memory: ToMemory | None
    spec: DTensorSpec
    shard_dim: int
    #: The post-accumulate hooks of the original parameter.
    hooks: Any
    #: The tensor defines its own gather (_extensions.py): `full` is a placeholder until the first gather makes the real
    #: one.
    extended: bool = False
    #: The dtype of its gradient, where that is not its own.
    grad_dtype: torch.dtype | None = None

    def around(self, shard: torch.Tensor) -> nn.Parameter:
        """The parameter that the optimizer sees, around this rank's shard."""
        inner = DTensor(shard.detach() if shard.requires_grad else shard, self.spec, requires_grad=False)
        parameter = nn.Parameter(inner, requires_grad=self.full.requires_grad)
        parameter._post_accumulate_grad_hooks = self.hooks
        if self.grad_dtype is not None:
            parameter.grad_dtype = self.grad_dtype
        return parameter


def leaf_of(
    parameter: nn.Parameter, mesh: MeshInfo, shard: Shard, dtype: torch.dtype | None, notes: Annotated | None = None
) -> Leaf:
    """A leaf for `parameter`, which is not changed. `dtype` is the one that its module computes in."""
    hooks = parameter._post_accumulate_grad_hooks
    spec = _spec_of(notes.dtensor if notes else parameter, mesh, shard)
    if not isinstance(parameter, DTensor):
        full = nn.Parameter(_normal(parameter), requires_grad=parameter.requires_grad)
        to_memory = None
        if notes:
            notes.annotate(full)
            to_memory = _to_memory(notes.dtensor, mesh, notes.gradient)
        return Leaf(full, None, None, to_memory, spec, shard.dim, hooks, grad_dtype=_keep_grad_dtype(parameter, full))
    detached = _normal(parameter)
    values = None
    is_cast = dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype
    if is_cast or parameter.is_meta:
        values = cast(DTensor, detached)._local_tensor
        # A DTensor never changes its dtype or device, so it has to have the right ones from the start.
        detached = DTensor(_cast_or_hollow(values, dtype, mesh), parameter._spec, requires_grad=False)
    full = nn.Parameter(detached, requires_grad=parameter.requires_grad)
    memory = cast(DTensor, full)._local_tensor
    grad_dtype = _keep_grad_dtype(parameter, full)
    return Leaf(full, memory, values, _to_memory(parameter, mesh), spec, shard.dim, hooks, grad_dtype=grad_dtype)


def _normal(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's values, in its memory unless it was made in inference mode: such tensors cannot be trained."""
    detached = parameter.detach()
    return detached.clone() if detached.is_inference() else detached


def _keep_grad_dtype(parameter: nn.Parameter, full: nn.Parameter) -> torch.dtype | None:
    dtype = own_grad_dtype(parameter)
    if dtype is not None:
        full.grad_dtype = dtype
    return dtype


def extended_leaf_of(
    parameter: nn.Parameter, own: torch.Tensor, mesh: MeshInfo, shard: Shard, dtype: torch.dtype
) -> Leaf:
    """The same for a parameter that defines its own gather: no memory until then. `own` is this rank's shard."""
    empty = torch.empty(local_of(parameter).size(), dtype=dtype, device="meta")
    full = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    to_memory = _to_memory(parameter, mesh) if isinstance(parameter, DTensor) else None
    hooks = parameter._post_accumulate_grad_hooks
    return Leaf(full, None, own, to_memory, _spec_of(parameter, mesh, shard), shard.dim, hooks, extended=True)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter that tensor parallelism has split; any other parameter as it is."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _cast_or_hollow(values: torch.Tensor, dtype: torch.dtype | None, mesh: MeshInfo) -> torch.Tensor:
    """The values in this dtype. Of values on the meta device: a tensor without memory, on their later device.

    The unit gives it memory later.
    """
    if not values.is_meta:
        return values.to(dtype)
    dtype = dtype if dtype is not None and values.is_floating_point() else values.dtype
    return _C.hollow(values.size(), dtype, _get_device_from_mesh(_mesh_of(mesh)))


def _spec_of(parameter: torch.Tensor, mesh: MeshInfo, shard: Shard) -> DTensorSpec:
    if isinstance(parameter, DTensor):
        whole = whole_mesh(mesh)
        return _combined(parameter, mesh, shard) if whole is None else spec_of(parameter, mesh, whole, shard)
    meta = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype)
    return DTensorSpec(_mesh_of(mesh), _placements(mesh, shard), tensor_meta=meta)


def _to_memory(parameter: DTensor, mesh: MeshInfo, given: tuple[Placement, ...] | None = None) -> ToMemory:
    whole = whole_mesh(mesh)
    return ToMemory(parameter._spec, whole.data_axes if whole else frozenset(), given)


class ToMemory:
    """Gives this rank's part of a gradient, laid out like its parameter, after any collective on it has ended.

    Along the axes for data parallelism it may stay a part of a sum: the unit adds these up.
    """

    def __init__(
        self, spec: DTensorSpec, data_axes: frozenset[int], given: tuple[Placement, ...] | None = None
    ) -> None:
        self._spec = spec
        self._data_axes = data_axes
        #: How plain gradients lie.
        self._given = None if given is None else DTensorSpec(spec.mesh, given, tensor_meta=spec.tensor_meta)
        #: Whether a gradient may be a part of a sum along another axis.
        self.may_sum = any(
            placement.is_replicate() if given is None else given[axis].is_partial()
            for axis, placement in enumerate(spec.placements)
            if axis not in data_axes
        )

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        spec = gradient._spec if isinstance(gradient, DTensor) else self._given
        if spec is None:
            return gradient
        local = local_of(gradient)
        placements = tuple(
            given if axis in self._data_axes and given.is_partial() else wanted
            for axis, (given, wanted) in enumerate(zip(spec.placements, self._spec.placements, strict=True))
        )
        if spec.placements != placements:
            wanted = DTensorSpec(self._spec.mesh, placements, tensor_meta=self._spec.tensor_meta)
            local = redistribute_local_tensor(local, spec, wanted)
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _mesh_of(mesh: MeshInfo) -> DeviceMesh:
    assert mesh.mesh is not None
    return mesh.mesh


def _placements(mesh: MeshInfo, shard: Placement) -> tuple[Placement, ...]:
    if isinstance(mesh, HSDPMeshInfo):
        return (Replicate(), shard)
    return (shard,) if isinstance(mesh, FSDPMeshInfo) else (Replicate(),)


def _combined(parameter: DTensor, mesh: MeshInfo, shard: Shard) -> DTensorSpec:
    """For a parameter that tensor parallelism has already split: the axes of data parallelism come first."""
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
