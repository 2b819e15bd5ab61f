"""Process groups that a program made in C++, as DeviceMeshes: DTensors need one."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwise import _C

#: By process group and name of the axis, so that units on one group have one mesh.
_made: weakref.WeakValueDictionary[tuple[int, str | None], DeviceMesh] = weakref.WeakValueDictionary()


def device_of(group: ProcessGroup) -> torch.device:
    """Where its ranks compute: on the accelerator where the group has one."""
    has_cuda = torch.cuda.is_available() and any(device.type == "cuda" for device in group._device_types)
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")


def device_mesh_of(mesh: Any, axis: str | None) -> Any:
    """A DeviceMesh over a process group, or over a C++ mesh of one axis; anything else as it is.

    A group that torch.distributed does not know is made known to it: all its ranks call this together. Where there is
    no default process group it becomes that.
    """
    if isinstance(mesh, _C.Mesh):
        names = [name for name, _ in mesh.axes]
        if len(names) != 1:
            raise ValueError(
                f"shardwise: a C++ mesh has to have one axis for modules of Python, and {mesh} has {len(names)}. Give "
                "a DeviceMesh: DeviceMesh.from_group() takes several process groups, which mesh.group(axis) gives."
            )
        mesh = mesh.group(names[0])
    if not isinstance(mesh, ProcessGroup):
        return mesh
    known = _made.get((id(mesh), axis))
    if known is None:
        if mesh not in distributed_c10d._world.pg_map:
            _make_known(mesh)
        names_of_axes = None if axis is None else (axis,)
        known = DeviceMesh.from_group(mesh, device_of(mesh).type, mesh_dim_names=names_of_axes)
        _made[id(mesh), axis] = known
    return known


def _make_known(group: ProcessGroup) -> None:
    """As torch's own functions do it for the groups that they make."""
    world = distributed_c10d._world
    name: Any = group.group_name or "shardwise"
    if name != group.group_name or name in world.pg_names.values():
        name = f"{name}/{len(world.pg_names)}"
        group._set_group_name(name)
    ranks = _ranks(group)
    backends = ",".join(f"{device.type}:custom" for device in group._device_types)
    distributed_c10d._update_process_group_global_state(
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
