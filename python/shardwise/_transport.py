"""The direct transport as a back end of torch.distributed, for tensors on the CPU, and for GPUs through its memory.

>>> import shardwise
>>> torch.distributed.init_process_group("shardwise")  # or "cpu:shardwise,cuda:nccl"
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from shardwise import _C

#: Its name in torch.distributed.
NAME = "shardwise"

#: The variables that env:// reads, and the one for the network interface that ranks connect over.
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def register() -> None:
    """Registers the back end with torch.distributed; importing shardwise does this."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])


def _make(options: Any, _: Any) -> Any:
    names = options.global_ranks_in_group
    try:
        return _C.make_transport(options.store, options.group_rank, options.group_size, options.timeout, names)
    except _C.PeerError as error:
        said = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in _VARIABLES)
        raise _C.PeerError(f"{error} The environment of this rank says {said}.") from None
