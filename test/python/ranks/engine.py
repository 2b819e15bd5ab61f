"""Two engines with one interface: torch's and ours.

SHARDWISE_TEST_ENGINE=torch puts torch's in the place of ours, which shows whether a test asks for more than torch does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import devices
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from meshes import shared_mesh
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy

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
    #: Where it computes.
    device: str = "cpu"


def on_device(engine: Engine, device: str) -> Engine:
    """With every mesh on this device, where it is not the one that they take by themselves."""
    if devices.DEVICE == "cpu":
        return engine

    def moved(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Any, *args: Any, mesh: Any = None, **options: Any) -> Any:
            shape = (dist.get_world_size(),) if mesh is None else tuple(mesh.shape)
            names = None if mesh is None else mesh.mesh_dim_names
            return function(module, *args, mesh=shared_mesh(shape, names, device), **options)

        return call

    return replace(engine, device=device, fully_shard=moved(engine.fully_shard), replicate=moved(engine.replicate))


HALVES = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
#: Ways to wrap a module with an engine.
KINDS: dict[str, Callable[[Engine, Any], Any]] = {
    "sharded": lambda engine, module: engine.fully_shard(module),
    "kept": lambda engine, module: engine.fully_shard(module, reshard_after_forward=False),
    "cast": lambda engine, module: engine.fully_shard(module, mp_policy=HALVES),
    "replicated": lambda engine, module: engine.replicate(module),
}

TORCH = Engine(
    name="torch",
    fully_shard=torch.distributed.fsdp.fully_shard,
    replicate=replicate_with_fsdp.replicate,
    FSDPModule=torch.distributed.fsdp.FSDPModule,
    ReplicateModule=replicate_with_fsdp.ReplicateModule,
    register_fsdp_forward_method=torch.distributed.fsdp.register_fsdp_forward_method,
    share_comm_ctx=torch.distributed.fsdp.share_comm_ctx,
)
TORCH = on_device(TORCH, devices.TORCHS)


def ours() -> Engine:
    """Ours, unless the environment asks for torch's."""
    if os.environ.get("SHARDWISE_TEST_ENGINE") == "torch":
        return TORCH
    engine = Engine(name="shardwise", **{name: getattr(shardwise, name) for name in _NAMES})
    return on_device(engine, devices.DEVICE)


_NAMES = (
    "fully_shard",
    "replicate",
    "FSDPModule",
    "ReplicateModule",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
