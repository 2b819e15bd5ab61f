"""Two engines with one interface: torch's and ours.

SHARDWISE_TEST_ENGINE=torch puts torch's in the place of ours, which shows whether a test asks for more than torch does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed.fsdp
from torch.distributed._composable import replicate_with_fsdp

import shardwise


@dataclass(frozen=True)
class Engine:
    """The functions and classes of one engine."""

    name: str
    fully_shard: Any
    replicate: Any
    FSDPModule: Any
    ReplicateModule: Any
    register_fsdp_forward_method: Any
    share_comm_ctx: Any


TORCH = Engine(
    name="torch",
    fully_shard=torch.distributed.fsdp.fully_shard,
    replicate=replicate_with_fsdp.replicate,
    FSDPModule=torch.distributed.fsdp.FSDPModule,
    ReplicateModule=replicate_with_fsdp.ReplicateModule,
    register_fsdp_forward_method=torch.distributed.fsdp.register_fsdp_forward_method,
    share_comm_ctx=torch.distributed.fsdp.share_comm_ctx,
)


def ours() -> Engine:
    """Ours, unless the environment asks for torch's."""
    if os.environ.get("SHARDWISE_TEST_ENGINE") == "torch":
        return TORCH
    return Engine(name="shardwise", **{name: getattr(shardwise, name) for name in _NAMES})


_NAMES = (
    "fully_shard",
    "replicate",
    "FSDPModule",
    "ReplicateModule",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
