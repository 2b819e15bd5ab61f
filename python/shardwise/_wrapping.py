"""Making the unit of one fully_shard() or replicate() call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    _cast_fp_tensor,
)
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh, _get_post_forward_mesh_info
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.utils import _apply_to_tensors, _get_root_modules, _to_kwargs
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise import _C, _stale_optimizers
from shardwise._extensions import Extension, cut, has_memory, is_extended
from shardwise._process_groups import device_of
from shardwise._specs import Leaf, extended_leaf_of, leaf_of, local_of
from shardwise._state import ParamGroup, State, state_of

Owner = tuple[nn.Module, str]

NO_CASTS = MixedPrecisionPolicy()
NO_OFFLOAD = OffloadPolicy()


@dataclass
class Found:
    """A parameter that this call is to manage: its names from the wrapped modules, and who has it."""

    parameter: nn.Parameter
    names: list[str]
    owners: list[Owner]


@dataclass(frozen=True)
class Policies:
    """What one call was told."""

    mesh: FSDPMeshInfo | HSDPMeshInfo | DDPMeshInfo
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_after_forward: bool | int | None
    post_forward_mesh: FSDPMeshInfo | None
    placement: Callable[[nn.Parameter], Shard | None] | None
    ignored: set[nn.Parameter]

    @property
    def replicates(self) -> bool:
        """Whether every rank holds everything."""
        return not isinstance(self.mesh, FSDPMeshInfo)

    @property
    def shards(self) -> int:
        """How many ranks hold one each."""
        return self.mesh.shard_mesh_size if isinstance(self.mesh, FSDPMeshInfo) else 1


def check_policies(function: str, mesh: Any, precision: Any, offload: Any, ignored: Any) -> None:
    """Raises TypeError for an argument of another kind than `function` takes."""
    wanted = (
        ("mesh", mesh, DeviceMesh),
        ("mp_policy", precision, MixedPrecisionPolicy),
        ("offload_policy", offload, OffloadPolicy),
        ("ignored_params", ignored, (set, frozenset)),
    )
    for name, value, kind in wanted:
        if isinstance(value, kind) or (value is None and name in ("mesh", "ignored_params")):
            continue
        names = kind.__name__ if isinstance(kind, type) else kind[0].__name__
        raise TypeError(f"shardwise: {function}() takes a {names} as {name}, and got {value!r:.200}.")


def check_module(module: nn.Module, function: str) -> None:
    """Raises ValueError for a container whose forward nobody can call."""
    for container in (nn.ModuleList, nn.ModuleDict):
        if isinstance(module, container) and type(module).forward is container.forward:
            raise ValueError(
                f"shardwise: {function} does not support containers that do not implement forward: {module}. "
                "Wrap the modules in it one by one, or give a list of them."
            )


def roots_of(module: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules of a call; those that lie in others of them left out."""
    return (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))


def default_mesh(names: tuple[str, ...] | None) -> DeviceMesh:
    """All ranks, on the accelerator where the process group has one."""
    if not dist.is_initialized():
        dist.init_process_group()
    group = dist.group.WORLD
    assert group is not None
    return init_device_mesh(device_of(group).type, (group.size(),), mesh_dim_names=names)


def post_forward_mesh(reshard_after_forward: Any, mesh: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """Who holds everything together after forward. Made once a mesh and number of ranks, for it has process groups."""
    made: dict[int, FSDPMeshInfo] = mesh.mesh.__dict__.setdefault("_shardwise_post_forward", {})
    if type(reshard_after_forward) is not int or reshard_after_forward not in made:
        info = _get_post_forward_mesh_info(reshard_after_forward, mesh)
        if info is None or info is mesh:
            return info
        made[reshard_after_forward] = info
    return made[reshard_after_forward]


def wrap(state: State, roots: Sequence[nn.Module], managed: Sequence[nn.Module], policies: Policies) -> None:
    """Makes the unit of these modules; `managed` are those whose own parameters it has."""
    mesh = policies.mesh.mesh
    assert mesh is not None
    device = _get_device_from_mesh(mesh)
    found = list(_parameters(roots, managed, policies.ignored))
    for each in found:
        _check(each, device, policies.replicates)
    _refuse_shared(found, roots)
    _move(found, managed, device)
    leaves, extensions = [], []
    for each in found:
        dim = _shard_dim(each, policies)
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
        list(_adopted(roots)),
        replicates=policies.replicates,
        param_dtype=policies.precision.param_dtype,
        reduce_dtype=policies.precision.reduce_dtype,
        may_cast=any(leaf.extended for leaf in leaves) or _may_cast(policies, device),
        pin_memory=policies.offload.pin_memory if isinstance(policies.offload, CPUOffloadPolicy) else None,
        reshard_after_forward=policies.reshard_after_forward,
        neighbours=_neighbours(policies),
    )
    group = ParamGroup(unit, tuple(roots), policies.mesh, policies.post_forward_mesh, policies.offload)
    for index, (each, leaf, shard) in enumerate(zip(found, leaves, unit.shards(), strict=True)):
        visible = leaf.around(leaf.values if leaf.extended and leaf.values is not None else shard)
        unit.show_as(index, visible, leaf.to_memory)
        for module, name in each.owners:
            _put(module, name, visible)
        _managed[each.parameter] = (weakref.ref(state), each.names[0])
        _stale_optimizers.note(each.names[0], each.parameter, leaf.full)
    unit.set_extend(lambda index: extensions[index]())
    unit.set_conversions(*_conversions(policies, device))
    state.start(roots, group, policies.reshard_after_forward is None and not policies.replicates)
    for module in {module for each in found for module, _ in each.owners}:
        _watch_state_dict(module, state)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def _parameters(
    roots: Sequence[nn.Module], managed: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> Iterator[Found]:
    """Each parameter of the managed modules once. In a list of modules a name begins with the module's place in it."""
    prefixes: dict[nn.Module, str] = {}
    for place, root in enumerate(roots):
        before = f"{place}." if len(roots) > 1 else ""
        for name, module in root.named_modules():
            prefixes.setdefault(module, before + (f"{name}." if name else ""))
    found: dict[nn.Parameter, Found] = {}
    own = set(managed)
    for module in (each for each in prefixes if each in own):
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            each = found.setdefault(parameter, Found(parameter, [], []))
            each.names.append(prefixes[module] + name)
            each.owners.append((module, name))
    yield from found.values()


def _adopted(roots: Sequence[nn.Module]) -> Iterator[tuple[list[str], torch.Tensor]]:
    """The parameters below that inner units have, with their names from here."""
    found: dict[torch.Tensor, list[str]] = {}
    for place, root in enumerate(roots):
        before = f"{place}." if len(roots) > 1 else ""
        for name, parameter in root.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor) and _C.has_unit(parameter):
                found.setdefault(parameter, []).append(before + name)
    return ((names, parameter) for parameter, names in found.items())


#: Parameters that were wrapped, with the state that has them now: who shares one without its module may still hold it.
_managed = WeakTensorKeyDictionary()


def _refuse_shared(found: Sequence[Found], roots: Sequence[nn.Module]) -> None:
    for each in found:
        weak, name = _managed.get(each.parameter, (lambda: None, ""))
        if (state := weak()) is not None:
            name = _path_of(state, roots) + name
            raise ValueError(
                f"shardwise: the parameter '{each.names[0]}' is shared with a parameter already managed by another "
                f"FSDP group, where it is '{name}': their gradients would not be added. Give both modules to one "
                "call, as a list, or name the parameter in ignored_params."
            )


def _path_of(state: State, roots: Sequence[nn.Module]) -> str:
    """Where the module of another call lies in these, with a dot; empty where it does not."""
    paths = (path for root in roots for path, module in root.named_modules() if module is state._modules[0])
    return next((f"{path}." for path in paths if path), "")


def _check(found: Found, device: torch.device, replicates: bool) -> None:
    parameter = found.parameter
    name = found.names[0]
    if isinstance(parameter, DTensor) and _C.has_unit(parameter):
        raise ValueError(
            f"shardwise: '{name}' and others belong to a unit that reaches outside of this module. Wrap inner modules "
            "first, outer ones after them; modules that share a parameter must be in one unit."
        )
    if parameter.dim() == 0:
        raise ValueError(
            f"shardwise: {'replicate' if replicates else 'fully_shard'} doesn't support scalar parameters. Change "
            f"{name} to a 1D tensor with numel equal to 1."
        )
    local = local_of(parameter)
    if not has_memory(local) and not is_extended(local, name):
        raise ValueError(
            f"shardwise: '{name}' is a {type(local).__name__}, which has no memory of its own: it is around other "
            "tensors, and cannot be cut into shards. Give its class fsdp_pre_all_gather() and fsdp_post_all_gather(), "
            "or name the parameter in ignored_params."
        )
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != device.type:
        raise ValueError(
            "shardwise: Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{parameter.device_mesh.device_type} for DTensor and {device.type} for FSDP: '{name}'."
        )
    if not replicates and not parameter.is_contiguous():
        raise NotImplementedError(
            f"shardwise: FSDP does not support non-contiguous parameters yet: '{name}' has {parameter.shape=} "
            f"{parameter.stride()=}. Make it contiguous() first."
        )


def _move(found: Sequence[Found], managed: Sequence[nn.Module], device: torch.device) -> None:
    buffers = (buffer for module in managed for buffer in module.buffers(recurse=False))
    for tensor in (*(each.parameter for each in found), *buffers):
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)


def _shard_dim(found: Found, policies: Policies) -> int:
    parameter = found.parameter
    chosen = policies.placement(parameter) if policies.placement is not None else None
    if chosen is None:
        chosen = Shard(0)
    name = found.names[0]
    assert isinstance(chosen, Shard), f"shardwise: Expected Shard, got {type(chosen)}: {chosen} for '{name}'."
    dim = chosen.dim + parameter.ndim if chosen.dim < 0 else chosen.dim
    assert dim < parameter.ndim, (
        f"shardwise: Shard dim {dim} is invalid for {parameter.ndim}D tensor: {parameter.shape} of '{name}'."
    )
    local = local_of(parameter)
    if dim > 0 and local.size(dim) % policies.shards != 0:
        raise NotImplementedError(
            f"shardwise: FSDP does not support uneven sharding on dim {dim}: '{name}' has {local.size()} "
            f"(world size: {policies.shards}). Choose dimension 0, or a size that the number of ranks divides."
        )
    return dim


def _leaf(found: Found, policies: Policies, dim: int) -> Leaf:
    parameter, kind = found.parameter, policies.precision.param_dtype
    local = local_of(parameter)
    if not is_extended(local, found.names[0]):
        return leaf_of(parameter, policies.mesh, Shard(dim), kind)
    rank = policies.mesh.shard_mesh_rank if isinstance(policies.mesh, FSDPMeshInfo) else 0
    own = cut(local, dim, rank, policies.shards)
    return extended_leaf_of(parameter, own, policies.mesh, Shard(dim), kind or parameter.dtype)


def _traits(found: Found, policies: Policies, device: torch.device, dim: int) -> dict[str, Any]:
    """What an extension of this parameter would be made of."""
    parameter = found.parameter
    return {
        "name": found.names[0],
        "module": weakref.ref(found.owners[0][0]),
        "mesh": policies.mesh.mesh,
        "policy": policies.precision,
        "device": device,
        "size": local_of(parameter).size(),
        "dim": dim,
        "world": policies.shards,
        "kind": policies.precision.param_dtype or parameter.dtype,
        "inner": parameter._spec if isinstance(parameter, DTensor) else None,
    }


def _may_cast(policies: Policies, device: torch.device) -> bool:
    """Whether modules may compute with other memory than the optimizer sees, where every rank holds everything."""
    moved = isinstance(policies.offload, CPUOffloadPolicy) and device.type != "cpu"
    return moved or policies.precision.param_dtype is not None


def _neighbours(policies: Policies) -> dist.ProcessGroup | None:
    """The process group that torch made of those that hold everything together after forward."""
    holders = policies.post_forward_mesh
    return None if holders is None or holders is policies.mesh else holders.shard_process_group


_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, _C.Mesh]] = weakref.WeakKeyDictionary()


def engine_mesh(mesh: DeviceMesh, replicates: bool, device: torch.device) -> _C.Mesh:
    """The same axes and process groups, for the engine. Made once, for as long as the first group lives: it has groups
    of its own, which all ranks make together, and when the models that use it are collected differs between ranks."""
    names = mesh.mesh_dim_names or (("replicate",) if replicates else ("shard",))
    groups = [mesh.get_group(index) for index in range(mesh.ndim)]
    made = _meshes.setdefault(groups[0], {})
    key = (names, device, *map(weakref.ref, groups[1:]))
    if key not in made:
        made[key] = _C.Mesh.from_process_groups(list(names), groups, device)
    return made[key]


def _conversions(policies: Policies, device: torch.device) -> tuple[Any, Any]:
    """What the inputs of a call go through, and its outputs; None where that is nothing."""
    precision = policies.precision
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


def _cast_inputs(kind: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
    cast = partial(_cast_fp_tensor, kind)
    return _apply_to_tensors(cast, args), _apply_to_tensors(cast, kwargs)


def _watch_state_dict(module: nn.Module, state: State) -> None:
    """A state dict has sharded parameters, and one that is loaded may replace them."""
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


def inner_state(module: nn.Module, kind: type[State]) -> State | None:
    """The state of this module if it is of that kind."""
    state = state_of(module)
    return state if type(state) is kind else None
