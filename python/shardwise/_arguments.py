"""The arguments of fully_shard() and replicate(), and the checks that need no other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.utils import _get_root_modules

from shardwise import _C, _torch_versions
from shardwise._mesh_dims import DataParallelMeshDims
from shardwise._placement import Placement
from shardwise._precision import override_of, own_dtype

NO_CASTS = MixedPrecisionPolicy()
NO_OFFLOAD = OffloadPolicy()


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, other than its modules."""

    mesh: DeviceMesh | ProcessGroup | _C.Mesh | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    reshard_after_forward: bool | int | None = False
    shard_placement_fn: Placement | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None

    @property
    def ignored(self) -> set[nn.Parameter]:
        """The parameters that are left alone."""
        return self.ignored_params or set()

    def options(self) -> _C.Options:
        """The same in the engine's form."""
        offload = self.offload_policy
        return engine_options(
            self.mp_policy,
            reshard_after_forward=self.reshard_after_forward,
            pin_memory=offload.pin_memory if isinstance(offload, CPUOffloadPolicy) else None,
        )


def engine_options(
    precision: MixedPrecisionPolicy, *, reshard_after_forward: bool | int | None, pin_memory: bool | None = None
) -> _C.Options:
    """Options for the engine. `pin_memory` is for shards in the host's memory; None if they stay on the device."""
    return _C.Options(
        param_dtype=precision.param_dtype,
        param_dtype_override=_override(precision),
        reduce_dtype=_torch_versions.reduce_dtype(precision),
        output_dtype=precision.output_dtype,
        cast_forward_inputs=precision.cast_forward_inputs,
        pin_memory=pin_memory,
        reshard_after_forward=reshard_after_forward,
    )


def _override(precision: MixedPrecisionPolicy) -> Callable[[str, torch.Tensor], torch.dtype | None] | None:
    if override_of(precision) is None:
        return None
    return lambda name, parameter: own_dtype(precision, parameter, name)


def check_kinds(function: str, given: Arguments, mesh: Any) -> None:
    """Raises TypeError for an argument of a type that `function` does not take.

    `mesh` is the DeviceMesh made from the given process group or C++ mesh.
    """
    wanted = (
        ("mesh", mesh, DeviceMesh),
        ("mp_policy", given.mp_policy, MixedPrecisionPolicy),
        ("offload_policy", given.offload_policy, OffloadPolicy),
        ("ignored_params", given.ignored_params, (set, frozenset)),
        ("dp_mesh_dims", given.dp_mesh_dims, DataParallelMeshDims),
    )
    # torch's functions take None for these too; verl passes it as offload_policy.
    may_be_none = ("mesh", "offload_policy", "ignored_params", "dp_mesh_dims")
    for name, value, kind in wanted:
        if isinstance(value, kind) or (value is None and name in may_be_none):
            continue
        names = kind.__name__ if isinstance(kind, type) else kind[0].__name__
        raise TypeError(f"shardwise: {function}(): {name} must be a {names}, not {value!r:.200}.")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        value = getattr(given.mp_policy, name)
        if not isinstance(value, torch.dtype | None):
            raise TypeError(f"shardwise: {function}(): {name} of mp_policy must be a torch.dtype, not {value!r:.200}.")


def check_module(module: nn.Module, function: str) -> None:
    """Raises ValueError for a container that has no forward to call."""
    for container in (nn.ModuleList, nn.ModuleDict):
        if isinstance(module, container) and type(module).forward is container.forward:
            raise ValueError(
                f"shardwise: {function} does not support containers that do not implement forward: {module}. "
                "Wrap the modules in it one by one, or give a list of them."
            )


def roots_of(module: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules of a call, without those that lie inside others of them."""
    return (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))
