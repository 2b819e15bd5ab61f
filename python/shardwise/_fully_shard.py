"""fully_shard(): every rank holds a shard of each parameter, and full parameters come and go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, _is_composable_with_fsdp
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules

from shardwise import _torch_api
from shardwise._arguments import NO_CASTS, NO_OFFLOAD, Arguments
from shardwise._C import Mesh
from shardwise._contract import Contract, checked
from shardwise._cpp_modules import is_cpp, refuse_without_unit
from shardwise._mesh_dims import DataParallelMeshDims, mesh_info
from shardwise._meshes import post_forward_mesh
from shardwise._module_classes import FSDPModule, add_class
from shardwise._parameters import Policies
from shardwise._placement import Placement
from shardwise._state import State
from shardwise._wrapping import wrap

M = TypeVar("M", bound="nn.Module | list[Any]")


def _fully_shard(module: Any, given: Arguments) -> Any:
    roots, device_mesh = checked("fully_shard", module, given)
    for root in roots:
        assert "replicate" not in (_get_registry(root) or {}), (
            f"shardwise: Cannot apply `fully_shard()` on a Module already managed by `replicate`: {root}."
        )
    mesh = mesh_info(device_mesh, given.dp_mesh_dims)
    post_forward = None
    if isinstance(mesh, FSDPMeshInfo):
        post_forward = post_forward_mesh(_reshards(given), mesh)
    else:  # copies alone
        given = replace(given, reshard_after_forward=False)
    managed = _get_managed_modules(
        roots, given.ignored, is_composable_fn=lambda each: _is_composable_with_fsdp(each) and not is_cpp(each)
    )
    refuse_without_unit(roots, given.ignored, "fully_shard")
    wrap(_contract.state(roots[0]), roots, managed, Policies(given, mesh, post_forward))
    for each in managed:
        each._is_fsdp_managed_module = True  # type: ignore[assignment]
        each._fsdp_use_orig_params = True  # type: ignore[assignment]
    for root in roots:
        add_class(root, FSDPModule, "FSDP")
    return module


def _reshards(given: Arguments) -> bool | int:
    reshards = given.reshard_after_forward
    if given.dp_mesh_dims is not None and type(reshards) is int:
        raise NotImplementedError(
            "shardwise: reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims). Pass a bool."
        )
    return True if reshards is None else reshards


_fully_shard.__name__ = "fully_shard"
_contract = Contract(_fully_shard, State, _torch_api.fully_shard)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placement | None = None,
    mp_policy: MixedPrecisionPolicy = NO_CASTS,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Shards the parameters of a module, or of a list of modules taken as one, over the ranks.

    Call it on inner modules first (each becomes a unit with collectives of its own) and on the outermost last. Full
    parameters are gathered when a unit runs and freed after that; parameters() are DTensors around this rank's shards,
    and so are their gradients. Returns its argument; the class of each module becomes FSDP<its name>.

    Args:
        module: the module, or modules that form one unit.
        mesh: a DeviceMesh. With one axis, its ranks hold the shards. With two, ranks along the second hold different
            shards, and ranks along the first hold copies. A process group or a mesh made in C++ works too. Default: all
            ranks.
        reshard_after_forward: whether full parameters are freed after forward. A number k frees them too, but every k
            neighbouring ranks keep one full copy, split among them. Default: they are freed, except for the outermost
            module.
        shard_placement_fn: returns, for a parameter, the Shard(dim) to cut it by, None for Shard(0), or a
            ShardPlacementResult if it lies on a mesh of its own, as experts do.
        mp_policy: the dtypes to compute and to sum in.
        offload_policy: CPUOffloadPolicy() keeps shards and gradients in the host's memory.
        ignored_params: parameters that are left alone.
        dp_mesh_dims: the axes of `mesh` that are for data parallelism. Parameters must then be DTensors on `mesh`,
            with Replicate() along these axes.

    >>> for block in model.blocks:
    ...     shardwise.fully_shard(block)
    >>> shardwise.fully_shard(model)
    """
    given = Arguments(
        mesh, mp_policy, offload_policy, ignored_params, reshard_after_forward, shard_placement_fn, dp_mesh_dims
    )
    return _contract(module, given)  # type: ignore[no-any-return]


# torch's function finds the states of modules that either engine wrapped.
fully_shard.state = _torch_api.fully_shard.state  # type: ignore[attr-defined]
