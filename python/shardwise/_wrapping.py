"""Making the unit of one fully_shard() or replicate() call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, _cast_fp_tensor
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.utils import _apply_to_tensors, _to_kwargs

from shardwise import _C, _automatic_steps, _parameters, _stale_optimizers
from shardwise._extensions import Extension, cut, is_extended
from shardwise._meshes import engine_mesh
from shardwise._parameters import Found, Policies
from shardwise._precision import of_parameter
from shardwise._specs import Leaf, extended_leaf_of, leaf_of, local_of
from shardwise._state import ParamGroup, State


def wrap(state: State, roots: Sequence[nn.Module], managed: Sequence[nn.Module], policies: Policies) -> None:
    """Makes the units of one call: one, and one more for each other mesh that parameters were given.

    `managed` are the modules whose own parameters belong to it.
    """
    # What is made here may be trained, even if the call is made in inference mode.
    with torch.inference_mode(False):
        _wrap(state, roots, managed, policies)


def _wrap(state: State, roots: Sequence[nn.Module], managed: Sequence[nn.Module], policies: Policies) -> None:
    assert policies.mesh.mesh is not None
    device = _get_device_from_mesh(policies.mesh.mesh)
    found = _parameters.take(roots, managed, policies, device)
    parts = [_Part(policies.on(mesh), some, device) for mesh, some in _parameters.by_mesh(found, policies.mesh)]
    for part in parts[:-1]:
        part.make([], is_companion=True)
    own = parts[-1]
    own.make(list(_parameters.of_inner_units(roots)), companions=[part.unit for part in parts[:-1]])
    for part in parts:
        part.show(state)
    own.unit.set_conversions(*_conversions(policies.given.mp_policy, device))
    _automatic_steps.watch()
    groups = [part.group(roots) for part in parts]
    state.start(roots, groups, policies.given.reshard_after_forward is None and not policies.replicates)
    for module in {module for each in found for module, _ in each.owners}:
        _watch_state_dict(module, state)


class _Part:
    """The parameters of a call that lie on one mesh, and their unit."""

    unit: _C.ModuleUnit

    def __init__(self, policies: Policies, found: Sequence[Found], device: torch.device) -> None:
        self._policies = policies
        self._found = found
        self._device = device
        self._extensions = [partial(Extension, **_traits(each, policies, device)) for each in found]
        self._leaves = [_leaf(each, policies) for each in found]

    def make(
        self,
        adopted: list[tuple[list[str], torch.Tensor]],
        *,
        is_companion: bool = False,
        companions: Sequence[_C.ModuleUnit] = (),
    ) -> None:
        """Makes the unit, around the parameters of inner ones and around its companions."""
        policies = self._policies
        mesh = policies.mesh.mesh
        assert mesh is not None
        self.unit = _C.ModuleUnit(
            engine_mesh(mesh, policies.replicates, self._device),
            [
                _C.GivenParameter(
                    names=each.names,
                    owners=each.owners,
                    full=leaf.full,
                    memory=leaf.memory,
                    values=leaf.values,
                    shard_dim=leaf.shard_dim,
                    full_dtype=each.own_dtype,
                    grad_dtype=leaf.grad_dtype,
                    extension=make() if leaf.extended else None,
                )
                for each, leaf, make in zip(self._found, self._leaves, self._extensions, strict=True)
            ],
            adopted,
            policies.given.options(),
            replicates=policies.replicates,
            neighbours=_neighbours(policies),
            is_companion=is_companion,
            companions=companions,
        )

    def show(self, state: State) -> None:
        """Puts what the optimizer sees into the modules."""
        for index, (each, leaf, shard) in enumerate(zip(self._found, self._leaves, self.unit.shards(), strict=True)):
            visible = leaf.around(leaf.values if leaf.extended and leaf.values is not None else shard)
            self.unit.show_as(index, visible, leaf.to_memory)
            for module, name in each.owners:
                _put(module, name, visible)
            _parameters.remember(each, state)
            _stale_optimizers.note(each.names[0], each.parameter, leaf.full)
        extensions = self._extensions
        self.unit.set_extend(lambda index: extensions[index]())

    def group(self, roots: Sequence[nn.Module]) -> ParamGroup:
        """What torch's tools take for a parameter group of torch's."""
        policies = self._policies
        return ParamGroup(
            self.unit, tuple(roots), policies.mesh, policies.post_forward_mesh, policies.given.offload_policy
        )


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def _leaf(found: Found, policies: Policies) -> Leaf:
    dim = found.dim
    parameter, dtype = found.parameter, of_parameter(policies.given.mp_policy, found.own_dtype).param_dtype
    local = local_of(parameter)
    if not is_extended(local, found.names[0]):
        return leaf_of(parameter, policies.mesh, Shard(dim), dtype, found.annotated)
    rank = policies.mesh.shard_mesh_rank if isinstance(policies.mesh, FSDPMeshInfo) else 0
    own = cut(local, dim, rank, policies.shards)
    return extended_leaf_of(parameter, own, policies.mesh, Shard(dim), dtype or parameter.dtype)


def _traits(found: Found, policies: Policies, device: torch.device) -> dict[str, Any]:
    """The arguments of Extension() for this parameter."""
    parameter = found.parameter
    policy = of_parameter(policies.given.mp_policy, found.own_dtype)
    return {
        "name": found.names[0],
        "module": weakref.ref(found.owners[0][0]),
        "mesh": policies.mesh.mesh,
        "policy": policy,
        "device": device,
        "size": local_of(parameter).size(),
        "dim": found.dim,
        "world": policies.shards,
        "dtype": policy.param_dtype or parameter.dtype,
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


def _conversions(precision: MixedPrecisionPolicy, device: torch.device) -> tuple[Any, Any]:
    """Functions that convert a call's inputs and its outputs; None if there is nothing to do."""
    inputs = []
    if device.type != "cpu":
        inputs.append(partial(_moved, device))
    if precision.cast_forward_inputs and precision.param_dtype is not None:
        inputs.append(partial(_cast_inputs, precision.param_dtype))

    def convert(args: Any, kwargs: Any) -> tuple[Any, Any]:
        for step in inputs:
            args, kwargs = step(args, kwargs)
        return args, kwargs

    outputs = None
    if precision.output_dtype is not None:
        outputs = partial(_apply_to_tensors, partial(_cast_fp_tensor, precision.output_dtype))
    return convert if inputs else None, outputs


def _moved(device: torch.device, args: Any, kwargs: Any) -> tuple[Any, Any]:
    moved, keywords = _to_kwargs(args, kwargs, device, False)
    return moved[0], keywords[0]


def _cast_inputs(dtype: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
    cast = partial(_cast_fp_tensor, dtype)
    return _apply_to_tensors(cast, args), _apply_to_tensors(cast, kwargs)
