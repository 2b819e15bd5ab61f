"""fully_shard(): every rank holds a shard of each parameter, and full parameters come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, _get_registry, contract
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import _is_composable_with_fsdp
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _get_managed_modules,
    _get_mesh_info,
    _validate_mesh,
)
from torch.distributed.tensor import Shard

from shardwise import _cpp_wrapping, _torch_api
from shardwise._C import Mesh
from shardwise._cpp_modules import is_cpp, takes
from shardwise._module_classes import FSDPModule, add_class
from shardwise._process_groups import device_mesh_of
from shardwise._state import State
from shardwise._wrapping import (
    NO_CASTS,
    NO_OFFLOAD,
    Policies,
    check_module,
    check_policies,
    default_mesh,
    post_forward_mesh,
    roots_of,
    wrap,
)

M = TypeVar("M", bound=nn.Module)


def _fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = NO_CASTS,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    roots = roots_of(module)
    given = device_mesh_of(mesh, None)
    check_policies("fully_shard", given, mp_policy, offload_policy, ignored_params)
    for root in roots:
        check_module(root, "fully_shard")
        assert "replicate" not in (_get_registry(root) or {}), (
            f"shardwise: Cannot apply `fully_shard()` on a Module already managed by `replicate`: {root}."
        )
    device_mesh: DeviceMesh = given or default_mesh(None)
    _validate_mesh(device_mesh)
    info = _get_mesh_info(device_mesh)
    automatic = reshard_after_forward is None
    post_forward = post_forward_mesh(True if automatic else reshard_after_forward, info)
    managed = _get_managed_modules(
        roots, ignored_params, is_composable_fn=lambda each: _is_composable_with_fsdp(each) and not is_cpp(each)
    )
    _cpp_wrapping.refuse_without_unit(roots, ignored_params, "fully_shard")
    state = _decorated.state(roots[0])
    wrap(
        state,
        roots,
        managed,
        Policies(
            mesh=info,
            precision=mp_policy,
            offload=offload_policy,
            reshard_after_forward=reshard_after_forward,
            post_forward_mesh=post_forward,
            placement=shard_placement_fn,
            ignored=ignored_params or set(),
        ),
    )
    for each in managed:
        each._is_fsdp_managed_module = True  # type: ignore[assignment]
        each._fsdp_use_orig_params = True  # type: ignore[assignment]
    for root in roots:
        add_class(root, FSDPModule, "FSDP")
    return module


_fully_shard.__name__ = "fully_shard"
_decorated: Any = contract(state_cls=State)(_fully_shard)


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> M: ...
@overload
def fully_shard(
    module: list[M],
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> list[M]: ...
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | ProcessGroup | Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = NO_CASTS,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shards the parameters of a module, or of a list of modules taken as one, over the ranks.

    Call it on inner modules first (each becomes a unit with collectives of its own) and on the outermost last. Full
    parameters are gathered when a unit runs and freed after that; parameters() are DTensors around this rank's shards,
    and so are their gradients. Returns what it was given; the class of each module becomes FSDP<its name>.

    Args:
        module: the module, or modules that form one unit.
        mesh: a DeviceMesh of one axis, or of two: those along the second hold shards, those along the first copies of
            them. Or a process group, or a mesh, that was made in C++. Default: all ranks.
        reshard_after_forward: whether full parameters are freed after forward, or the number of ranks that hold
            everything together then. Default: they are, but for the outermost module.
        shard_placement_fn: given a parameter, the Shard(dim) to cut it by, or None for Shard(0).
        mp_policy: the dtypes to compute and to sum in.
        offload_policy: CPUOffloadPolicy() keeps shards and gradients in the host's memory.
        ignored_params: parameters that are left alone.

    >>> for block in model.blocks:
    ...     shardwise.fully_shard(block)
    >>> shardwise.fully_shard(model)
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
    }
    if takes(module):
        return _cpp_wrapping.fully_shard(module, **options)
    return apply(_decorated, _fully_shard, _torch_api.fully_shard, module, options)


def apply(decorated: Any, own: Callable[..., Any], torchs: Any, module: Any, options: dict[str, Any]) -> Any:
    """Calls it and leaves its state where those who ask torch's function look too; nothing where it fails."""
    is_list = isinstance(module, (list, tuple)) and all(isinstance(each, nn.Module) for each in module)
    if not is_list and not isinstance(module, nn.Module):
        raise TypeError(f"shardwise: {own.__name__} expects an nn.Module or a list of them, and got {module!r:.200}.")
    roots = roots_of(module)
    if not roots:
        raise ValueError(f"shardwise: {own.__name__} got no module: the list is empty.")
    before = [(each, own in each.__dict__.get(STATE_KEY, {})) for each in roots]
    try:
        result = decorated(module, **options)
    except BaseException:
        for each, there in before:
            if not there:
                each.__dict__.get(STATE_KEY, {}).pop(own, None)
                each.__dict__.get(REGISTRY_KEY, {}).pop(own.__name__, None)
        raise
    for each in roots:
        states = each.__dict__[STATE_KEY]
        states[torchs.__wrapped__] = states[own]
    return result


# Ours is there too, and so the state of a module that torch wrapped is found.
fully_shard.state = _torch_api.fully_shard.state  # type: ignore[attr-defined]
