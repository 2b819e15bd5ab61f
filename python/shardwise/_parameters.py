"""Which parameters a call of fully_shard() or replicate() manages, and the checks that it can manage them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise import _C
from shardwise._arguments import Arguments
from shardwise._extensions import has_memory, is_extended
from shardwise._mesh_dims import check_parameter, whole_mesh
from shardwise._meshes import post_forward_mesh
from shardwise._placement import chosen
from shardwise._precision import own_dtype
from shardwise._specs import local_of
from shardwise._spmd_types import Annotated, annotated
from shardwise._state import State, describe_shared

Owner = tuple[nn.Module, str]
MeshInfo = FSDPMeshInfo | HSDPMeshInfo | DDPMeshInfo


@dataclass
class Found:
    """A parameter that this call manages: its names, relative to the wrapped modules, and the modules that hold it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    #: What shard_placement_fn chose: the dimension to cut it along, and a mesh of its own.
    dim: int = 0
    #: The dtype that its module computes with, where it is not that of the policy.
    own_dtype: torch.dtype | None = None
    mesh: FSDPMeshInfo | None = None
    #: How it lies on the whole mesh, where that is noted on a plain tensor.
    annotated: Annotated | None = None


@dataclass(frozen=True)
class Policies:
    """The arguments of one call, and its ranks."""

    given: Arguments
    mesh: MeshInfo
    #: The ranks that together hold full parameters between forward and backward.
    post_forward_mesh: FSDPMeshInfo | None = None

    def on(self, mesh: MeshInfo) -> Policies:
        """The same for parameters on this mesh."""
        if mesh is self.mesh or not isinstance(mesh, FSDPMeshInfo):
            return self
        reshard = self.given.reshard_after_forward
        return replace(self, mesh=mesh, post_forward_mesh=post_forward_mesh(True if reshard is None else reshard, mesh))

    @property
    def replicates(self) -> bool:
        """Whether every rank holds everything."""
        return not isinstance(self.mesh, FSDPMeshInfo)

    @property
    def shards(self) -> int:
        """How many shards a parameter is cut into."""
        return shard_count(self.mesh)


def take(
    roots: Sequence[nn.Module], managed: Sequence[nn.Module], policies: Policies, device: torch.device
) -> list[Found]:
    """Checks the parameters of the managed modules, moves them and their buffers to the device, and returns them."""
    found = _find(roots, managed, policies.given.ignored)
    for each in found:
        _check(each, device, policies.replicates)
        _check_layers(each, policies)
        _choose_placement(each, policies)
        each.own_dtype = own_dtype(policies.given.mp_policy, each.parameter, each.names[0])
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
            each = found.setdefault(parameter, Found(parameter))
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
    """Notes that the parameter is managed by the call with this state. Warns if another call manages it too."""
    other, name = _managed.get(found.parameter, (lambda: None, ""))
    if other() is not None:
        state.shared.append((found.names[0], other, name))
        warnings.warn(
            f"{describe_shared(found.names[0], name)} The first forward will be an error.", UserWarning, stacklevel=9
        )
    _managed[found.parameter] = (weakref.ref(state), found.names[0])


def _check(found: Found, device: torch.device, replicates: bool) -> None:
    parameter = found.parameter
    name = found.names[0]
    if isinstance(parameter, DTensor) and _C.has_unit(parameter):
        raise ValueError(
            f"shardwise: a unit has parameters both inside and outside this module: '{name}' is inside. "
            "Wrap inner modules before outer ones, and put modules that share a parameter into one unit."
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


def _check_layers(found: Found, policies: Policies) -> None:
    """Layers that change their weight in their forward, for what this rank looks up."""
    assert policies.mesh.mesh is not None
    tables = (module for module, _ in found.owners if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    if policies.mesh.mesh.size() == 1 or all(table.max_norm is None for table in tables):
        return
    what = f"'{found.names[0]}' belongs to a layer with max_norm, which changes rows of it in its forward"
    remedy = "Leave max_norm out, and bound the rows after each step of the optimizer."
    if policies.replicates:
        raise ValueError(
            f"shardwise: replicate(): {what}, other ones on each rank, so the ranks' copies would differ. {remedy}"
        )
    warnings.warn(f"shardwise: fully_shard(): {what}; the change is lost with the full copy. {remedy}", stacklevel=8)


def _move(found: Sequence[Found], managed: Sequence[nn.Module], device: torch.device) -> None:
    buffers = (buffer for module in managed for buffer in module.buffers(recurse=False))
    for tensor in (*(each.parameter for each in found), *buffers):
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)


def _choose_placement(found: Found, policies: Policies) -> None:
    parameter, name = found.parameter, found.names[0]
    placement = policies.given.shard_placement_fn
    if placement is not None and policies.replicates:
        raise ValueError(
            f"shardwise: Per-param mesh via shard_placement_fn is not supported with {type(policies.mesh).__name__}; "
            "it requires FSDPMeshInfo (or subclass). Name a shard axis in dp_mesh_dims."
        )
    dim, found.mesh = chosen(placement, parameter, name)
    found.dim = dim or 0
    mesh = found.mesh or policies.mesh
    found.annotated = annotated(parameter, name, mesh)
    if (whole := whole_mesh(mesh)) is not None:
        check_parameter(name, found.annotated.dtensor if found.annotated else parameter, whole)
    shards = shard_count(mesh)
    local = local_of(parameter)
    if found.dim > 0 and local.size(found.dim) % shards != 0:
        raise NotImplementedError(
            f"shardwise: FSDP does not support uneven sharding on dim {found.dim}: '{name}' has {local.size()} "
            f"(world size: {shards}). Choose dimension 0, or a size that the number of ranks divides."
        )


def by_mesh(found: Sequence[Found], own: MeshInfo) -> list[tuple[MeshInfo, list[Found]]]:
    """The parameters of each mesh, those of the call's own mesh last."""
    meshes: dict[object, tuple[MeshInfo, list[Found]]] = {}
    for each in found:
        mesh = each.mesh or own
        known, others = meshes.setdefault(_process_groups(mesh), (mesh, []))
        if mesh is not known:
            raise ValueError(
                "shardwise: Params sharing the same process group must use the same FSDPMeshInfo object, but "
                f"shard_placement_fn gave '{each.names[0]}' another one than '{others[0].names[0]}' has."
            )
        others.append(each)
    last = meshes.pop(_process_groups(own), (own, []))
    return [*meshes.values(), last]


def _process_groups(mesh: MeshInfo) -> tuple[object, ...]:
    """What sets the ranks of two meshes apart."""
    if not isinstance(mesh, FSDPMeshInfo):
        return (mesh.replicate_process_group,)
    copies = mesh.replicate_process_group if isinstance(mesh, HSDPMeshInfo) else None
    return (mesh.shard_process_group, copies)


def shard_count(mesh: MeshInfo) -> int:
    """How many shards a parameter is cut into."""
    return mesh.shard_mesh_size if isinstance(mesh, FSDPMeshInfo) else 1
