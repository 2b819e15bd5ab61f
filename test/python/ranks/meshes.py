"""Device meshes that the cases of one run share: to make process groups takes longer than a few steps."""

from __future__ import annotations

import threading

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Key = tuple[tuple[int, ...], tuple[str, ...] | None, str]


class _Made(threading.local):
    """Of this rank, which may be a thread."""

    def __init__(self) -> None:
        self.world: dist.ProcessGroup | None = None
        self.meshes: dict[Key, DeviceMesh] = {}


_made = _Made()


def shared_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None, device: str = "cpu") -> DeviceMesh:
    """The one of this shape and these names on such devices, for as long as the default process group is the same."""
    if dist.group.WORLD is not _made.world:
        _made.world = dist.group.WORLD
        _made.meshes.clear()
    if (shape, names, device) not in _made.meshes:
        _made.meshes[shape, names, device] = init_device_mesh(device, shape, mesh_dim_names=names)
    return _made.meshes[shape, names, device]
