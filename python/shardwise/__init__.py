"""Data parallelism for PyTorch and LibTorch on one C++ engine over c10d.

>>> import shardwise
>>> model = shardwise.replicate(model)  # under torchrun, or after torch.distributed.init_process_group()
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise import _compatibility

_compatibility.check()

from torch.utils import cmake_prefix_path as _torchs  # noqa: E402

from shardwise import cpp, transport  # noqa: E402
from shardwise._build_info import VERSION as __version__  # noqa: E402
from shardwise._C import Error, PeerError  # noqa: E402
from shardwise._plan import Plan, plan  # noqa: E402
from shardwise._record import record  # noqa: E402

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    from shardwise._estimate import MemoryEstimate, estimate_memory
    from shardwise._fully_shard import fully_shard
    from shardwise._install import install, uninstall
    from shardwise._local_optimizer import local_optimizer
    from shardwise._replicate import replicate
    from shardwise.modules import (
        FSDPModule,
        ReplicateModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )

transport.register()

Error.__doc__ = """What the engine raises; the message says what happened, where, and what to do.

>>> try:
...     loss.backward()
... except shardwise.Error as error:
...     print(error)
"""

PeerError.__doc__ = """Another rank failed, or called something else: this one stops waiting, and says for whom.

>>> try:
...     loss.backward()
... except shardwise.PeerError:
...     save_and_leave()
"""

#: Give this to CMake as CMAKE_PREFIX_PATH; find_package(shardwise) then finds the C++ library of this package, and the
#: torch of this Python, which need not lie beside it.
cmake_prefix_path = f"{Path(__file__).parent / 'share' / 'cmake'};{_torchs}"

#: What needs torch's own fully_shard and DTensor is imported when it is first asked for.
_LAZY = {
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "FSDPModule": "shardwise.modules",
    "MemoryEstimate": "shardwise._estimate",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "ReplicateModule": "shardwise.modules",
    "UnshardHandle": "shardwise.modules",
    "estimate_memory": "shardwise._estimate",
    "fully_shard": "shardwise._fully_shard",
    "install": "shardwise._install",
    "local_optimizer": "shardwise._local_optimizer",
    "register_fsdp_forward_method": "shardwise.modules",
    "replicate": "shardwise._replicate",
    "share_comm_ctx": "shardwise.modules",
    "uninstall": "shardwise._install",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'shardwise' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


__all__ = [
    "CPUOffloadPolicy",
    "Error",
    "FSDPModule",
    "MemoryEstimate",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PeerError",
    "Plan",
    "ReplicateModule",
    "UnshardHandle",
    "__version__",
    "cmake_prefix_path",
    "cpp",
    "estimate_memory",
    "fully_shard",
    "install",
    "local_optimizer",
    "plan",
    "record",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "uninstall",
]
