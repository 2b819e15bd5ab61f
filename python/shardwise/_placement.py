"""shard_placement_fn: the dimension that a parameter is cut along, and the ranks that hold its shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard


@dataclass
class _ShardPlacementResult:
    """What a shard_placement_fn may return: how to cut the parameter (None: Shard(0)), and over which mesh.

    All parameters on one mesh must be given the same FSDPMeshInfo object.

    >>> experts = FSDPMeshInfo(mesh["experts_data"], shard_mesh_dim=0)
    >>> shardwise.fully_shard(
    ...     layer,
    ...     mesh=mesh["data"],
    ...     shard_placement_fn=lambda parameter: shardwise.ShardPlacementResult(None, experts)
    ...     if parameter in expert_parameters
    ...     else None,
    ... )
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


_ShardPlacementResult.__name__ = _ShardPlacementResult.__qualname__ = "ShardPlacementResult"

if TYPE_CHECKING:
    ShardPlacementResult = _ShardPlacementResult
else:
    #: torch's own class where it has one, since torch 2.12.
    ShardPlacementResult = vars(_fsdp_common).get("ShardPlacementResult", _ShardPlacementResult)

Placement = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


def chosen(placement: Placement | None, parameter: torch.Tensor, name: str) -> tuple[int | None, FSDPMeshInfo | None]:
    """The dimension and the mesh that a shard_placement_fn chose; None for what it leaves to the call."""
    result: Any = None if placement is None else placement(cast(nn.Parameter, parameter))
    mesh: FSDPMeshInfo | None = None
    if isinstance(result, ShardPlacementResult):
        result, mesh = result.placement, result.mesh_info
        if not isinstance(mesh, FSDPMeshInfo):
            raise TypeError(
                f"shardwise: shard_placement_fn gave '{name}' a ShardPlacementResult whose mesh_info is {mesh!r:.200}. "
                "It must be an FSDPMeshInfo or HSDPMeshInfo."
            )
    if result is None:
        return None, mesh
    if not isinstance(result, Shard):
        raise ValueError(f"shardwise: Invalid shard_placement_fn result: {result!r:.200} for '{name}'.")
    assert -parameter.ndim <= result.dim < parameter.ndim, (
        f"shardwise: Shard dim {result.dim} is invalid for {parameter.ndim}D tensor: {parameter.shape} of '{name}'."
    )
    dim: int = result.dim % parameter.ndim
    return dim, mesh


def chosen_dim(placement: Placement | None, parameter: torch.Tensor, name: str, caller: str) -> int | None:
    """The dimension alone. Raises NotImplementedError where `caller` knows no parameters with meshes of their own."""
    dim, mesh = chosen(placement, parameter, name)
    if mesh is not None:
        raise NotImplementedError(
            f"shardwise: shard_placement_fn gave '{name}' a mesh of its own, which {caller} does not support."
        )
    return dim
