"""replicate(): every rank holds the whole module, and backward averages the gradients over the ranks."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable.replicate_with_fsdp import (
    _validate_mesh,
    is_composable_with_replicate,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules

from shardwise import _torch_api
from shardwise._arguments import NO_CASTS, NO_OFFLOAD, Arguments
from shardwise._C import Mesh
from shardwise._contract import Contract, checked
from shardwise._cpp_modules import is_cpp, refuse_without_unit
from shardwise._mesh_dims import DataParallelMeshDims, mesh_info
from shardwise._module_classes import ReplicateModule, add_class
from shardwise._parameters import Policies
from shardwise._state import ReplicateState, state_of
from shardwise._wrapping import wrap

M = TypeVar("M", bound="nn.Module | list[Any]")


def _replicate(module: Any, given: Arguments) -> Any:
    roots, device_mesh = checked("replicate", module, given)
    for root in roots:
        if not is_composable_with_replicate(root):
            raise RuntimeError(
                f"shardwise: Cannot apply `replicate()` on a Module already managed by `fully_shard`: {root}."
            )
    mesh = _mesh_info(device_mesh, given.dp_mesh_dims)
    managed = _get_managed_modules(
        roots,
        given.ignored,
        is_composable_fn=lambda each: is_composable_with_replicate(each) and not is_cpp(each),
        get_state_fn=_inner_state,
    )
    refuse_without_unit(roots, given.ignored, "replicate")
    wrap(_contract.state(roots[0]), roots, managed, Policies(given, mesh))
    for root in roots:
        add_class(root, ReplicateModule, "Replicate")
    return module


def _mesh_info(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DDPMeshInfo:
    if dims is None:
        _validate_mesh(mesh)
        return DDPMeshInfo(mesh, replicate_mesh_dim=0)
    info = mesh_info(mesh, dims)
    if not isinstance(info, DDPMeshInfo) or dims.shard_names:
        raise ValueError(
            "shardwise: replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). Use fully_shard() "
            "for sharding."
        )
    return info


def _inner_state(module: nn.Module) -> ReplicateState | None:
    """The state of a module that replicate() already wrapped: this call does not manage its parameters."""
    state = state_of(module)
    return state if type(state) is ReplicateState else None


_replicate.__name__ = "replicate"
_contract = Contract(_replicate, ReplicateState, _torch_api.replicate)


def replicate(
    module: M,
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = None,
    mp_policy: MixedPrecisionPolicy = NO_CASTS,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Averages the gradients of a module, or of a list of modules taken as one, over the ranks after each backward.

    Call it on inner modules first (each becomes a unit with a collective of its own) and on the outermost last. Returns
    its argument; the class of each module becomes Replicate<its name>, and its parameters() become DTensors, complete
    on every rank. Every rank must wrap the same modules in the same order. Nothing broadcasts values: start all ranks
    from the same seed or checkpoint.

    Args:
        module: the module, or modules that form one unit.
        mesh: a one-dimensional DeviceMesh, a process group, or a mesh made in C++. Default: all ranks of the default
            process group. If there is none, the call makes it from torchrun's environment.
        mp_policy: the dtypes to compute and to sum in.
        offload_policy: CPUOffloadPolicy() keeps parameters and gradients in the host's memory.
        ignored_params: parameters that are left alone.
        dp_mesh_dims: the axes of `mesh` that hold copies. Parameters must then be DTensors on `mesh`, with Replicate()
            along these axes.

    A parameter that no rank used gets no gradient. If some ranks used it, it gets the mean, with zero for the others.

    >>> for block in model.blocks:
    ...     shardwise.replicate(block)
    >>> shardwise.replicate(model)
    """
    given = Arguments(mesh, mp_policy, offload_policy, ignored_params, dp_mesh_dims=dp_mesh_dims)
    return _contract(module, given)  # type: ignore[no-any-return]


replicate.state = _torch_api.replicate.state  # type: ignore[attr-defined]
