"""The direct transport as a back end of torch.distributed, for CPU tensors.

>>> import shardwise
>>> torch.distributed.init_process_group("shardwise")  # or "cpu:shardwise,cuda:nccl"
"""

from __future__ import annotations

import torch.distributed as dist

from shardwise import _C

#: What torch.distributed calls it.
NAME = "shardwise"


def register() -> None:
    """Makes the back end known to torch.distributed; importing shardwise does it."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _C.make_transport, devices=["cpu"])
