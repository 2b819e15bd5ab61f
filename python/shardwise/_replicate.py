"""replicate(): every rank holds the whole module, and backward averages the gradients over the ranks."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable.contract import contract
from torch.distributed._composable.replicate_with_fsdp import (
    _validate_mesh,
    is_composable_with_replicate,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules

from shardwise import _cpp_wrapping, _torch_api
from shardwise._C import Mesh
from shardwise._cpp_modules import is_cpp, takes
from shardwise._fully_shard import apply
from shardwise._module_classes import ReplicateModule, add_class
from shardwise._process_groups import device_mesh_of
from shardwise._state import ReplicateState
from shardwise._wrapping import (
    NO_CASTS,
    NO_OFFLOAD,
    Policies,
    check_module,
    check_policies,
    default_mesh,
    inner_state,
    roots_of,
    wrap,
)

M = TypeVar("M", bound=nn.Module)


def _replicate(
    module: nn.Module,
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = None,
    mp_policy: MixedPrecisionPolicy = NO_CASTS,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    roots = roots_of(module)
    given = device_mesh_of(mesh, "replicate")
    check_policies("replicate", given, mp_policy, offload_policy, ignored_params)
    for root in roots:
        check_module(root, "replicate")
        if not is_composable_with_replicate(root):
            raise RuntimeError(
                f"shardwise: Cannot apply `replicate()` on a Module already managed by `fully_shard`: {root}."
            )
    device_mesh: DeviceMesh = given or default_mesh(("replicate",))
    _validate_mesh(device_mesh)
    managed = _get_managed_modules(
        roots,
        ignored_params,
        is_composable_fn=lambda each: is_composable_with_replicate(each) and not is_cpp(each),
        get_state_fn=lambda each: inner_state(each, ReplicateState),
    )
    _cpp_wrapping.refuse_without_unit(roots, ignored_params, "replicate")
    wrap(
        _decorated.state(roots[0]),
        roots,
        managed,
        Policies(
            mesh=DDPMeshInfo(device_mesh, replicate_mesh_dim=0),
            precision=mp_policy,
            offload=offload_policy,
            reshard_after_forward=False,
            post_forward_mesh=None,
            placement=None,
            ignored=ignored_params or set(),
        ),
    )
    for root in roots:
        add_class(root, ReplicateModule, "Replicate")
    return module


_replicate.__name__ = "replicate"
_decorated: Any = contract(state_cls=ReplicateState)(_replicate)


@overload
def replicate(
    module: M,
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> M: ...
@overload
def replicate(
    module: list[M],
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> list[M]: ...
def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = None,
    mp_policy: MixedPrecisionPolicy = NO_CASTS,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Averages the gradients of a module, or of a list of modules taken as one, over the ranks after each backward.

    Call it on inner modules first (each becomes a unit with a collective of its own) and on the outermost last.
    Returns what it was given; the class of each module becomes Replicate<its name>, and its parameters() are DTensors
    that every rank holds all of. Every rank must wrap the same modules in the same order. Values are not broadcast:
    start from the same seed or checkpoint.

    Args:
        module: the module, or modules that form one unit.
        mesh: a one-dimensional DeviceMesh. Default: all ranks (the default process group, which is made from
            torchrun's environment where there is none). Or a process group, or a mesh, that was made in C++.
        mp_policy: the dtypes to compute and to sum in.
        offload_policy: CPUOffloadPolicy() keeps parameters and gradients in the host's memory.
        ignored_params: parameters that are left alone.

    A parameter that no rank used gets no gradient; one that some ranks used gets the mean, the others counting zero.

    >>> for block in model.blocks:
    ...     shardwise.replicate(block)
    >>> shardwise.replicate(model)
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
    }
    if takes(module):
        return _cpp_wrapping.replicate(module, **options)
    return apply(_decorated, _replicate, _torch_api.replicate, module, options)


replicate.state = _torch_api.replicate.state  # type: ignore[attr-defined]
