"""Which parameters a call of fully_shard() or replicate() manages, and the checks that it can manage them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise import _C
from shardwise._arguments import Arguments, chosen_dim
from shardwise._extensions import has_memory, is_extended
from shardwise._mesh_dims import check_parameter, whole_mesh
from shardwise._specs import local_of
from shardwise._state import State

Owner = tuple[nn.Module, str]


@dataclass
class Found:
    """A parameter that this call manages: its names, relative to the wrapped modules, and the modules that hold it."""

    parameter: nn.Parameter
    names: list[str]
    owners: list[Owner]


@dataclass(frozen=True)
class Policies:
    """The arguments of one call, and its ranks."""

    given: Arguments
    mesh: FSDPMeshInfo | HSDPMeshInfo | DDPMeshInfo
    #: The ranks that together hold full parameters between forward and backward.
    post_forward_mesh: FSDPMeshInfo | None = None

    @property
    def replicates(self) -> bool:
        """Whether every rank holds everything."""
        return not isinstance(self.mesh, FSDPMeshInfo)

    @property
    def shards(self) -> int:
        """How many shards a parameter is cut into."""
        return self.mesh.shard_mesh_size if isinstance(self.mesh, FSDPMeshInfo) else 1


def take(
    roots: Sequence[nn.Module], managed: Sequence[nn.Module], policies: Policies, device: torch.device
) -> list[Found]:
    """Checks the parameters of the managed modules, moves them and their buffers to the device, and returns them."""
    found = _find(roots, managed, policies.given.ignored)
    whole = whole_mesh(policies.mesh)
    for each in found:
        _check(each, device, policies.replicates)
        if whole is not None:
            check_parameter(each.names[0], each.parameter, whole)
    _refuse_shared(found, roots)
    _move(found, managed, device)
    return found


def _find(roots: Sequence[nn.Module], managed: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Found]:
    """Each parameter of the managed modules, once. In a list of modules, names begin with the module's index."""
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
    return list(found.values())


def of_inner_units(roots: Sequence[nn.Module]) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Parameters inside these modules that already belong to units, with their names from here."""
    found: dict[torch.Tensor, list[str]] = {}
    for place, root in enumerate(roots):
        before = f"{place}." if len(roots) > 1 else ""
        for name, parameter in root.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor) and _C.has_unit(parameter):
                found.setdefault(parameter, []).append(before + name)
    return ((names, parameter) for parameter, names in found.items())


#: The original parameters of wrapped modules, with the state of their call and their name in it. A module elsewhere
#: that shares such a parameter still holds the original.
_managed = WeakTensorKeyDictionary()


def remember(found: Found, state: State) -> None:
    """Notes that the parameter is managed by the call with this state."""
    _managed[found.parameter] = (weakref.ref(state), found.names[0])


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
    """The path from these roots to another call's module, ending in a dot; empty if it lies outside them."""
    paths = (path for root in roots for path, module in root.named_modules() if module is state._modules[0])
    return next((f"{path}." for path in paths if path), "")


def _check(found: Found, device: torch.device, replicates: bool) -> None:
    parameter = found.parameter
    name = found.names[0]
    if isinstance(parameter, DTensor) and _C.has_unit(parameter):
        raise ValueError(
            f"shardwise: this module has a part of a unit that also has parameters outside of it; '{name}' is in that "
            "part. Wrap inner modules before outer ones, and put modules that share a parameter into one unit."
        )
    if parameter.dim() == 0:
        raise ValueError(
            f"shardwise: {'replicate' if replicates else 'fully_shard'} doesn't support scalar parameters. Change "
            f"{name} to a 1D tensor with numel equal to 1."
        )
    local = local_of(parameter)
    if not has_memory(local) and not is_extended(local, name):
        raise ValueError(
            f"shardwise: '{name}' is a {type(local).__name__}, which has no memory of its own but is made of other "
            "tensors, so it cannot be sharded or replicated. Give its class fsdp_pre_all_gather() and "
            "fsdp_post_all_gather(), or name the parameter in ignored_params."
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


def shard_dim(found: Found, policies: Policies) -> int:
    """The dimension that shards are cut along: the first one unless shard_placement_fn chose another."""
    parameter, name = found.parameter, found.names[0]
    dim = chosen_dim(policies.given.shard_placement_fn, parameter, name) or 0
    local = local_of(parameter)
    if dim > 0 and local.size(dim) % policies.shards != 0:
        raise NotImplementedError(
            f"shardwise: FSDP does not support uneven sharding on dim {dim}: '{name}' has {local.size()} "
            f"(world size: {policies.shards}). Choose dimension 0, or a size that the number of ranks divides."
        )
    return dim
