"""Makes DeviceMeshes from what programs give as a mesh, and the engine's meshes from DeviceMeshes."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info

from shardwise import _C
from shardwise._torch_versions import register_process_group

#: Keyed by process group, and by whether the mesh is for replicate(), so that units on one group share a mesh.
_made: weakref.WeakKeyDictionary[ProcessGroup, weakref.WeakValueDictionary[bool, DeviceMesh]]
_made = weakref.WeakKeyDictionary()

#: The engine's meshes, by their first process group.
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, _C.Mesh]] = weakref.WeakKeyDictionary()


#: What torchrun, mpirun and Slurm tell the processes that they start.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def device_of(group: ProcessGroup) -> torch.device:
    """Where the group's ranks compute: on the accelerator if the group has one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or all(device.type != accelerator.type for device in group._device_types):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_mesh_of(mesh: Any, replicates: bool) -> Any:
    """A DeviceMesh over a process group, or over a C++ mesh of one axis; anything else is returned as it is.

    A group that torch.distributed does not know is registered with it, which all its ranks do together. If there is no
    default process group, it becomes that.
    """
    if isinstance(mesh, _C.Mesh):
        names = [name for name, _ in mesh.axes]
        if len(names) != 1:
            raise ValueError(
                f"shardwise: for Python modules a C++ mesh must have one axis, but {mesh} has {len(names)}. Pass a "
                "DeviceMesh instead: DeviceMesh.from_group() makes one from the process groups that mesh.group(axis) "
                "returns."
            )
        mesh = mesh.group(names[0])
    if not isinstance(mesh, ProcessGroup):
        return mesh
    made = _made.setdefault(mesh, weakref.WeakValueDictionary())
    known = made.get(replicates)
    if known is None:
        if mesh not in distributed_c10d._world.pg_map:
            _make_known(mesh)
        known = DeviceMesh.from_group(mesh, device_of(mesh).type, mesh_dim_names=_names(replicates))
        made[replicates] = known
    return known


def default_mesh(replicates: bool) -> DeviceMesh:
    """All ranks, on the accelerator if the process group has one. A process that no launcher started is alone."""
    if not dist.is_initialized():
        if any(name in os.environ for name in _LAUNCHERS):
            dist.init_process_group()
        else:
            dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    return init_device_mesh(device_of(group).type, (group.size(),), mesh_dim_names=_names(replicates))


def post_forward_mesh(reshard_after_forward: Any, mesh: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """The ranks that together hold the full parameters after forward; None if nothing is freed then.

    It needs process groups, so it is made once for each mesh and number of ranks.
    """
    made: dict[int, FSDPMeshInfo] = mesh.mesh.__dict__.setdefault("_shardwise_post_forward", {})
    if type(reshard_after_forward) is not int or reshard_after_forward not in made:
        info = _get_post_forward_mesh_info(reshard_after_forward, mesh)
        if info is None or info is mesh:
            return info
        made[reshard_after_forward] = info
    return made[reshard_after_forward]


def engine_mesh(mesh: DeviceMesh, replicates: bool, device: torch.device) -> _C.Mesh:
    """The same axes and process groups, for the engine.

    Made once, and kept as long as the first group lives: making it takes all ranks together, because the engine's mesh
    makes process groups of its own, but ranks may garbage-collect the models that use it at different times.
    """
    names = mesh.mesh_dim_names or (("replicate",) if replicates else ("shard",))
    groups = [mesh.get_group(index) for index in range(mesh.ndim)]
    made = _meshes.setdefault(groups[0], {})
    key = (names, device, *map(weakref.ref, groups[1:]))
    if key not in made:
        made[key] = _C.Mesh.from_process_groups(list(names), groups, device)
    return made[key]


def _names(replicates: bool) -> tuple[str, ...] | None:
    """torch names the axis of replicate()'s mesh, but not that of fully_shard()'s."""
    return ("replicate",) if replicates else None


def _make_known(group: ProcessGroup) -> None:
    """Registers a group as torch's own functions register those that they make."""
    world = distributed_c10d._world
    name: Any = group.group_name or "shardwise"
    if name != group.group_name or name in world.pg_names.values():
        name = f"{name}/{len(world.pg_names)}"
        group._set_group_name(name)
    ranks = _ranks(group)
    backends = ",".join(f"{device.type}:custom" for device in group._device_types)
    register_process_group(
        group, "custom", group.get_group_store(), name, backends, {rank: at for at, rank in enumerate(ranks)}
    )
    if not dist.is_initialized():
        distributed_c10d._update_default_pg(group)


def _ranks(group: ProcessGroup) -> list[int]:
    """The numbers of its ranks in the default process group."""
    if not dist.is_initialized():
        return list(range(group.size()))
    mine = torch.tensor([dist.get_rank()], device=device_of(group))
    ranks = mine.new_empty(group.size())
    group._allgather_base(ranks, mine).wait()
    return ranks.tolist()
