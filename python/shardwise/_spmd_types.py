"""Plain parameters that the package spmd_types annotates: each has a type on every axis of a mesh."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Annotated:
    """What such annotations say of a parameter."""

    #: The parameter as a DTensor on the whole mesh.
    dtensor: DTensor
    #: How its gradient, a plain tensor too, lies on that mesh.
    gradient: tuple[Placement, ...]
    #: Annotates the full parameter alike, for programs that have their types checked.
    annotate: Callable[[torch.Tensor], object]


def annotated(parameter: nn.Parameter, name: str, mesh: DataParallelMeshInfo) -> Annotated | None:
    """None for a parameter without such annotations. Raises torch's errors for those that do not fit the mesh."""
    if isinstance(parameter, DTensor) or not _is_available():
        return None
    runtime: Any = importlib.import_module("spmd_types.runtime")
    if not (types := runtime.get_local_type(parameter)):
        return None
    # Since torch 2.15, torch's own class for a parameter reads them; it notes here what it finds.
    read: Any = SimpleNamespace(_module_info=SimpleNamespace(param_name=name))
    resolve = vars(FSDPParam)["_resolve_spmd_types_for_storage"]
    cuts = runtime.get_partition_spec(parameter)
    dtensor = resolve(read, parameter, cuts, types, mesh)

    def annotate(full: torch.Tensor) -> object:
        return runtime.assert_type(full, read._spmd_restore_type, partition_spec=cuts)

    return Annotated(dtensor, read._spmd_grad_placements, annotate)


def _is_available() -> bool:
    return hasattr(FSDPParam, "_resolve_spmd_types_for_storage") and dist._is_spmd_types_available()
