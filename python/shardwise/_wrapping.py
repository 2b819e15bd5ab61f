"""Making the unit of one fully_shard() or replicate() call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwise import _C, _automatic_steps, _parameters, _stale_optimizers
from shardwise._conversions import conversions
from shardwise._extensions import Extension, cut, is_extended
from shardwise._meshes import engine_mesh
from shardwise._parameters import Found, Policies
from shardwise._specs import Leaf, extended_leaf_of, leaf_of, local_of
from shardwise._state import ParamGroup, State


def wrap(state: State, roots: Sequence[nn.Module], managed: Sequence[nn.Module], policies: Policies) -> None:
    """Makes the unit of one call. `managed` are the modules whose own parameters belong to it."""
    mesh = policies.mesh.mesh
    assert mesh is not None
    device = _get_device_from_mesh(mesh)
    given = policies.given
    found = _parameters.take(roots, managed, policies, device)
    leaves, extensions = [], []
    for each in found:
        dim = _parameters.shard_dim(each, policies)
        extensions.append(partial(Extension, **_traits(each, policies, device, dim)))
        leaves.append(_leaf(each, policies, dim))
    unit = _C.Unit(
        engine_mesh(mesh, policies.replicates, device),
        [
            _C.GivenParameter(
                names=each.names,
                owners=each.owners,
                full=leaf.full,
                memory=leaf.memory,
                values=leaf.values,
                shard_dim=leaf.shard_dim,
                extension=make() if leaf.extended else None,
            )
            for each, leaf, make in zip(found, leaves, extensions, strict=True)
        ],
        list(_parameters.of_inner_units(roots)),
        given.options(),
        replicates=policies.replicates,
        neighbours=_neighbours(policies),
    )
    group = ParamGroup(unit, tuple(roots), policies.mesh, policies.post_forward_mesh, given.offload_policy)
    for index, (each, leaf, shard) in enumerate(zip(found, leaves, unit.shards(), strict=True)):
        visible = leaf.around(leaf.values if leaf.extended and leaf.values is not None else shard)
        unit.show_as(index, visible, leaf.to_memory)
        for module, name in each.owners:
            _put(module, name, visible)
        _parameters.remember(each, state)
        _stale_optimizers.note(each.names[0], each.parameter, leaf.full)
    unit.set_extend(lambda index: extensions[index]())
    unit.set_conversions(*conversions(given.mp_policy, device))
    _automatic_steps.watch()
    state.start(roots, group, given.reshard_after_forward is None and not policies.replicates)
    for module in {module for each in found for module, _ in each.owners}:
        _watch_state_dict(module, state)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def _leaf(found: Found, policies: Policies, dim: int) -> Leaf:
    parameter, dtype = found.parameter, policies.given.mp_policy.param_dtype
    local = local_of(parameter)
    if not is_extended(local, found.names[0]):
        return leaf_of(parameter, policies.mesh, Shard(dim), dtype)
    rank = policies.mesh.shard_mesh_rank if isinstance(policies.mesh, FSDPMeshInfo) else 0
    own = cut(local, dim, rank, policies.shards)
    return extended_leaf_of(parameter, own, policies.mesh, Shard(dim), dtype or parameter.dtype)


def _traits(found: Found, policies: Policies, device: torch.device, dim: int) -> dict[str, Any]:
    """The arguments of Extension() for this parameter."""
    parameter = found.parameter
    return {
        "name": found.names[0],
        "module": weakref.ref(found.owners[0][0]),
        "mesh": policies.mesh.mesh,
        "policy": policies.given.mp_policy,
        "device": device,
        "size": local_of(parameter).size(),
        "dim": dim,
        "world": policies.shards,
        "dtype": policies.given.mp_policy.param_dtype or parameter.dtype,
        "inner": parameter._spec if isinstance(parameter, DTensor) else None,
    }


def _neighbours(policies: Policies) -> dist.ProcessGroup | None:
    """torch's process group of the ranks that together hold the full parameters after forward."""
    holders = policies.post_forward_mesh
    return None if holders is None or holders is policies.mesh else holders.shard_process_group


def _watch_state_dict(module: nn.Module, state: State) -> None:
    """Makes state dicts show the sharded parameters; after a load the unit adopts the module's parameters."""
    weak = weakref.ref(state)

    def reshard(*_: Any) -> None:
        if (alive := weak()) is not None:
            alive.unit.reshard()

    def refresh_parameters(*_: Any) -> None:
        if (alive := weak()) is not None:
            alive.refresh_parameters()

    module.register_state_dict_pre_hook(reshard)
    module.register_load_state_dict_pre_hook(reshard)
    module.register_load_state_dict_post_hook(refresh_parameters)
