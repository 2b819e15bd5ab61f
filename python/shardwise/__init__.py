"""Data parallelism for PyTorch and LibTorch on one C++ engine over c10d.

>>> import shardwise
>>> model = shardwise.replicate(model)  # under torchrun, or after torch.distributed.init_process_group()
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise import _compatibility

if problem := _compatibility.find_problem():
    if not _compatibility.is_program():
        raise ImportError(problem, name="shardwise")
    # `python -m shardwise doctor` must be able to report the problem, and this package is imported before its __main__.
    from shardwise.__main__ import main

    raise SystemExit(main())

from torch.utils import cmake_prefix_path as _torchs

from shardwise import _transport
from shardwise._build_info import VERSION as __version__
from shardwise._C import Error, PeerError
from shardwise._record import record

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    from shardwise import checkpoint, cpp
    from shardwise._estimate import Link, MemoryEstimate, TimeEstimate, estimate_memory, estimate_time
    from shardwise._fully_shard import fully_shard
    from shardwise._idle_memory import free_idle_memory
    from shardwise._install import install, uninstall
    from shardwise._local_optimizer import local_optimizer
    from shardwise._local_switch import set_local_optimizers
    from shardwise._mesh_dims import DataParallelMeshDims
    from shardwise._module_classes import (
        FSDPModule,
        GradientReductionHandle,
        ReplicateModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from shardwise._placement import ShardPlacementResult
    from shardwise._plan import Plan, plan
    from shardwise._precision import MixedPrecisionPolicy
    from shardwise._replicate import replicate
    from shardwise._whole import with_whole_parameters

_transport.register()

Error.__doc__ = """An error of shardwise. The message says what happened, where, and what to do.

>>> try:
...     loss.backward()
... except shardwise.Error as error:
...     print(error)
"""

PeerError.__doc__ = """Another rank, the store or a process group failed or did not answer.

It is a torch.distributed.DistError, so programs that catch torch's errors of other ranks catch it too.

>>> try:
...     loss.backward()
... except shardwise.PeerError:
...     save_and_leave()
"""

#: Pass this to CMake as CMAKE_PREFIX_PATH: find_package(shardwise) then finds the C++ library in this package, and the
#: torch of this Python, which may lie elsewhere.
cmake_prefix_path = f"{Path(__file__).parent / 'share' / 'cmake'};{_torchs}"

#: Public names that are imported on first use, and the modules that define them: these need torch's fully_shard and
#: DTensor.
_LAZY = {
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "DataParallelMeshDims": "shardwise._mesh_dims",
    "FSDPModule": "shardwise._module_classes",
    "GradientReductionHandle": "shardwise._module_classes",
    "Link": "shardwise._estimate",
    "MemoryEstimate": "shardwise._estimate",
    "MixedPrecisionPolicy": "shardwise._precision",
    "OffloadPolicy": "torch.distributed.fsdp",
    "Plan": "shardwise._plan",
    "ReplicateModule": "shardwise._module_classes",
    "ShardPlacementResult": "shardwise._placement",
    "TimeEstimate": "shardwise._estimate",
    "UnshardHandle": "shardwise._module_classes",
    "checkpoint": "shardwise.checkpoint",
    "cpp": "shardwise.cpp",
    "estimate_memory": "shardwise._estimate",
    "estimate_time": "shardwise._estimate",
    "free_idle_memory": "shardwise._idle_memory",
    "fully_shard": "shardwise._fully_shard",
    "install": "shardwise._install",
    "local_optimizer": "shardwise._local_optimizer",
    "plan": "shardwise._plan",
    "register_fsdp_forward_method": "shardwise._module_classes",
    "replicate": "shardwise._replicate",
    "set_local_optimizers": "shardwise._local_switch",
    "share_comm_ctx": "shardwise._module_classes",
    "uninstall": "shardwise._install",
    "with_whole_parameters": "shardwise._whole",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'shardwise' has no attribute '{name}'")
    module = importlib.import_module(_LAZY[name])
    value = globals()[name] = module if module.__name__ == f"shardwise.{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Error",
    "FSDPModule",
    "GradientReductionHandle",
    "Link",
    "MemoryEstimate",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PeerError",
    "Plan",
    "ReplicateModule",
    "ShardPlacementResult",
    "TimeEstimate",
    "UnshardHandle",
    "__version__",
    "checkpoint",
    "cmake_prefix_path",
    "cpp",
    "estimate_memory",
    "estimate_time",
    "free_idle_memory",
    "fully_shard",
    "install",
    "local_optimizer",
    "plan",
    "record",
    "register_fsdp_forward_method",
    "replicate",
    "set_local_optimizers",
    "share_comm_ctx",
    "uninstall",
    "with_whole_parameters",
]
