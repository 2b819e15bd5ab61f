"""torch's own functions and classes, even while install() has replaced them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule as ReplicateModule
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate
    from torch.distributed.fsdp import FSDPModule as FSDPModule
    from torch.distributed.fsdp import fully_shard as fully_shard
    from torch.distributed.fsdp import register_fsdp_forward_method as register_fsdp_forward_method
    from torch.distributed.fsdp import share_comm_ctx as share_comm_ctx

#: The modules in which torch defines what install() replaces.
_DEFINED = {
    "FSDPModule": "torch.distributed.fsdp._fully_shard._fully_shard",
    "ReplicateModule": "torch.distributed._composable.replicate_with_fsdp",
    "fully_shard": "torch.distributed.fsdp._fully_shard._fully_shard",
    "register_fsdp_forward_method": "torch.distributed.fsdp._fully_shard._fully_shard",
    "replicate": "torch.distributed._composable.replicate_with_fsdp",
    "share_comm_ctx": "torch.distributed.fsdp._fully_shard._fully_shard",
}

#: Everything above by name. install() does not change the dictionaries of torch's modules.
ALL: dict[str, Any] = {name: vars(importlib.import_module(module))[name] for name, module in _DEFINED.items()}

globals().update(ALL)
