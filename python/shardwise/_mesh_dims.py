"""dp_mesh_dims: which axes of a mesh are for data parallelism, where parameters are DTensors on the whole mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info, _validate_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass
class _DataParallelMeshDims:
    """The axes of a mesh along which parameters are sharded, and those along which there are copies, by name.

    Several names stand for one axis that is made of them. At least one of both must be given.

    >>> dims = shardwise.DataParallelMeshDims(shard=("data", "context"), replicate="host")
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("shardwise: DataParallelMeshDims needs at least one of shard and replicate.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes of `shard`."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes of `replicate`."""
        return _names(self.replicate)


_DataParallelMeshDims.__name__ = _DataParallelMeshDims.__qualname__ = "DataParallelMeshDims"


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


if TYPE_CHECKING:
    DataParallelMeshDims = _DataParallelMeshDims
else:
    #: torch's own class where it has one, since torch 2.12.
    DataParallelMeshDims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", _DataParallelMeshDims)


@dataclass(frozen=True)
class WholeMesh:
    """The mesh that parameters lie on before they are wrapped, and its axes for data parallelism."""

    mesh: DeviceMesh
    dims: _DataParallelMeshDims

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its axes."""
        return self.mesh.mesh_dim_names or ()

    @property
    def data_axes(self) -> frozenset[int]:
        """The numbers of the axes for data parallelism."""
        return frozenset(self.names.index(name) for name in (*self.dims.shard_names, *self.dims.replicate_names))


def mesh_info(mesh: DeviceMesh, dims: _DataParallelMeshDims | None) -> FSDPMeshInfo | DDPMeshInfo:
    """How units spread over this mesh: over all of it, or over the named axes. Raises ValueError for wrong ones."""
    if dims is None:
        _validate_mesh(mesh)
        return cast(FSDPMeshInfo, _get_mesh_info(mesh))
    _check(mesh, dims)
    info = _over(mesh, dims)
    # As torch 2.15 has them.
    vars(info).update(spmd_mesh=mesh, dp_mesh_dims=dims, is_spmd_mesh=True)
    return info


def whole_mesh(info: DataParallelMeshInfo) -> WholeMesh | None:
    """The mesh that was given with dp_mesh_dims; None where there were none."""
    dims = getattr(info, "dp_mesh_dims", None)
    return None if dims is None else WholeMesh(vars(info)["spmd_mesh"], dims)


def check_parameter(name: str, parameter: torch.Tensor, whole: WholeMesh) -> None:
    """Raises ValueError for a parameter that does not lie whole along the axes for data parallelism."""
    if not isinstance(parameter, DTensor):
        raise ValueError(
            "shardwise: When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
            f"distribute_module). Got plain tensor for parameter '{name}'."
        )
    if parameter.device_mesh != whole.mesh:
        raise ValueError(
            "shardwise: Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different "
            f"mesh objects: '{name}' lies on {parameter.device_mesh}, and the call was given {whole.mesh}."
        )
    for axis in sorted(whole.data_axes):
        if not isinstance(parameter.placements[axis], Replicate):
            kind = "shard" if whole.names[axis] in whole.dims.shard_names else "replicate"
            raise ValueError(
                f"shardwise: Expected Replicate() on DP {kind} dim '{whole.names[axis]}' (index {axis}) but got "
                f"{parameter.placements[axis]} for '{name}'."
            )


def spec_of(parameter: DTensor, info: DataParallelMeshInfo, whole: WholeMesh, shard: Shard) -> DTensorSpec:
    """How the parameter is spread once it is wrapped. Several axes that shard it become one."""
    names, axes = whole.names, whole.mesh
    placements = list(parameter.placements)
    shards = [names.index(name) for name in whole.dims.shard_names]
    for axis in shards:
        placements[axis] = _beside_others(placements, axis, axes, shard)
    if len(shards) <= 1:
        return DTensorSpec(axes, tuple(placements), tensor_meta=parameter._spec.tensor_meta)
    assert info.mesh is not None
    data = whole.data_axes
    parts, spread = [], []
    for axis, placement in enumerate(placements):
        if axis == shards[0]:
            parts.append(info.mesh)
            spread += [Replicate(), placement] if isinstance(info, HSDPMeshInfo) else [placement]
        elif axis not in data:
            parts.append(axes[names[axis]])
            spread.append(placement)
    return DTensorSpec(DeviceMesh._concatenate(parts), tuple(spread), tensor_meta=parameter._spec.tensor_meta)


def _beside_others(placements: list[Placement], axis: int, mesh: DeviceMesh, shard: Shard) -> Placement:
    """`shard` along this axis, where later axes may cut the same dimension."""
    split = 1
    for later in range(axis + 1, mesh.ndim):
        placement = placements[later]
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == shard.dim:
            split *= mesh.size(later)
    return _StridedShard(shard.dim, split_factor=split) if split > 1 else shard


def _check(mesh: DeviceMesh, dims: _DataParallelMeshDims) -> None:
    wanted = (*dims.shard_names, *dims.replicate_names)
    if not wanted:
        raise ValueError("shardwise: At least one of shard or replicate must be set in dp_mesh_dims.")
    if mesh.mesh_dim_names is None:
        raise ValueError("shardwise: mesh must have mesh_dim_names when dp_mesh_dims is provided.")
    for name in wanted:
        if name not in mesh.mesh_dim_names:
            raise ValueError(
                f"shardwise: Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}."
            )
        if wanted.count(name) > 1:
            raise ValueError(f"shardwise: dp_mesh_dims names the axis '{name}' twice: {dims}.")


def _over(mesh: DeviceMesh, dims: _DataParallelMeshDims) -> FSDPMeshInfo | DDPMeshInfo:
    shard, replicate = (_as_one(mesh, names) for names in (dims.shard_names, dims.replicate_names))
    if shard is None:
        assert replicate is not None
        return DDPMeshInfo(replicate, replicate_mesh_dim=0)
    if replicate is None:
        return FSDPMeshInfo(shard, shard_mesh_dim=0)
    return HSDPMeshInfo(DeviceMesh._concatenate([replicate, shard]), shard_mesh_dim=1, replicate_mesh_dim=0)


def _as_one(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    if len(names) <= 1:
        return mesh[names[0]] if names else None
    return mesh[names]._flatten("_".join(names))
