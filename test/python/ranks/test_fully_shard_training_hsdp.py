"""The row of fully_shard_training on a mesh of two dimensions."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch.distributed as dist
from engine import TORCH, Engine, ours
from form import by_form
from microbatches import MICROBATCHES, is_last
from models import batch
from parity import Parity, Program, Wrapping, assert_same_bits
from pool import run_ranks
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from training_models import mlps


def norm_and_mlps(width: int) -> Program:
    return Program(
        lambda: mlps(width, 3, nn.LayerNorm(width)),
        lambda model, number, rank: model(batch(number, rank, width)).pow(2).mean(),
        steps=by_form(3, 5),
        parts=MICROBATCHES,
    )


def on_grid(mesh: Any, reshard: bool, checkpointed: bool, sync_at_last: bool, offload: bool = False) -> Wrapping:
    # Pinned memory needs an accelerator.
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()

    def wrap(engine: Engine, model: Any) -> None:
        for module in [*model, model]:
            if checkpointed and module is not model:
                checkpoint(module)
            engine.fully_shard(module, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)

    def before(model: Any, part: int) -> None:
        if sync_at_last:
            model.set_requires_gradient_sync(is_last(part))

    def after(model: Any, part: int) -> None:
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor) and parameter.placements == (Replicate(), Shard(0))
            if parameter.to_local().numel() == 0:
                continue
            # Earlier ones are out of sight until they are averaged; then all are there.
            has_one = parameter.grad is not None and bool(parameter.grad.to_local().any())
            if is_last(part) or not sync_at_last:
                assert has_one
            else:
                assert not has_one

    return Wrapping(wrap, before=before, after=after)


def on_two_dimensions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for width in by_form((3, 17), (3, 16, 17)):
        parity = Parity(norm_and_mlps(width))
        for sync_at_last in (True, False):
            theirs = parity.run(TORCH, on_grid(mesh, True, False, sync_at_last))
            every = list(product((True, False), (False, True)))
            for reshard, checkpointed in by_form([every[sync_at_last], every[2 + sync_at_last]], every):
                mine = parity.run(ours(), on_grid(mesh, reshard, checkpointed, sync_at_last))
                # Two ranks along each dimension: every sum is of two.
                assert_same_bits(mine, theirs)
            if width == 17:
                mine = parity.run(ours(), on_grid(mesh, True, True, sync_at_last, offload=True))
                assert_same_bits(mine, theirs)


class TestFullyShardHSDPTraining:
    def test_train_parity_hsdp(self) -> None:
        run_ranks(4, on_two_dimensions, timeout=300)
