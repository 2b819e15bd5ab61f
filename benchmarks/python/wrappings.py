"""The ways to wrap the example's GPT that are measured beside each other, and a step of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "python"))
from model import Gpt, GptOptions, initialize

#: Ours over torch's process groups, or torch's over ours; else each over its own.
OVER_GLOO, OVER_SHARDWISE = "_over_gloo", "_over_shardwise"
OURS = ("fully_shard", "fully_shard_keep", "hsdp", "replicate")


def make_model(layers: int, width: int, heads: int, length: int) -> Gpt:
    """That has values; for texts of so many bytes."""
    model = Gpt(GptOptions(layers=layers, width=width, heads=heads, context=max(length, GptOptions.context)))
    initialize(model, 1)
    return model


def is_ours(wrap: str) -> bool:
    return wrap.removesuffix(OVER_GLOO) in OURS


def back_end_of(wrap: str) -> str:
    """The process groups' on CPUs."""
    return "shardwise" if wrap in OURS or wrap.endswith(OVER_SHARDWISE) else "gloo"


def fully_sharded(model: Gpt, unit: Callable[[nn.Module], Any]) -> nn.Module:
    for block in model.blocks:
        unit(block)
    unit(model)
    return model


def mesh_of(wrap: str, device_type: str) -> DeviceMesh:
    world = dist.get_world_size()
    if wrap.startswith("hsdp") or wrap == "torch_hsdp":
        return init_device_mesh(device_type, (2, world // 2), mesh_dim_names=("copies", "shards"))
    return init_device_mesh(device_type, (world,), mesh_dim_names=("ranks",))


def distribute(model: Gpt, wrap: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With a lower dtype parameters are gathered in it; what keeps whole ones computes in it by autocast."""
    wrap = wrap.removesuffix(OVER_GLOO).removesuffix(OVER_SHARDWISE)
    if wrap == "none":
        return model
    if wrap == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = mesh_of(wrap, next(model.parameters()).device.type)
    usual = dtype == torch.float32
    given: dict[str, Any] = {} if usual else {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    units: dict[str, Callable[[nn.Module], Any]] = {
        "fsdp2": lambda module: fully_shard(module, mesh=mesh, **given),
        "fsdp2_keep": lambda module: fully_shard(module, mesh=mesh, reshard_after_forward=False, **given),
        "torch_hsdp": lambda module: fully_shard(module, mesh=mesh, **given),
        "torch_replicate": lambda module: replicate(module, mesh=mesh, **given),
        "fully_shard": lambda module: shardwise.fully_shard(module, mesh=mesh, **given),
        "fully_shard_keep": lambda module: shardwise.fully_shard(
            module, mesh=mesh, reshard_after_forward=False, **given
        ),
        "hsdp": lambda module: shardwise.fully_shard(module, mesh=mesh, **given),
        "replicate": lambda module: shardwise.replicate(module, mesh=mesh, **given),
    }
    return fully_sharded(model, units[wrap])


def optimizer_of(model: nn.Module, wrap: str) -> Any:
    usual = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return shardwise.local_optimizer(usual) if is_ours(wrap) else usual


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Steps:
    """A model, how it is wrapped, and a step of it."""

    def __init__(self, model: Gpt, wrap: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = distribute(model, wrap, dtype)
        self._autocasts = torch.autocast("cuda", dtype, enabled=wrap in ("none", "ddp") and dtype != torch.float32)
        self._optimizer = optimizer_of(self.model, wrap)

    def passes(self, text: Tensor) -> None:
        """Without the optimizer."""
        self._optimizer.zero_grad()
        with self._autocasts:
            loss = loss_of(self.model, text)
        loss.backward()

    def step(self, text: Tensor) -> None:
        self.passes(text)
        self._optimizer.step()


class DeepSpeedSteps:
    """The same with DeepSpeed's ZeRO 3, which has a step of its own."""

    def __init__(self, model: Gpt) -> None:
        import deepspeed

        # Its own launcher would say so.
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def passes(self, text: Tensor) -> None:
        self.model.backward(loss_of(self.model, text))

    def step(self, text: Tensor) -> None:
        self.passes(text)
        self.model.step()
