"""A program for torch's functions trains to the same bits before install(), after it and after uninstall()."""

from __future__ import annotations

from typing import Any

import torch
from engine import TORCH
from models import batch
from torch.distributed import fsdp
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from training_models import mlps

import shardwise
from shardwise.testing import run_ranks

STEPS = 4


#: The class that a function gave a model, and losses and values at the end.
Result = tuple[type, list[torch.Tensor]]


def assert_same(found: Result, wanted: Result, base: type, where: str) -> None:
    assert found[0] is base, where
    assert len(found[1]) == len(wanted[1]) > 0 and all(map(torch.equal, found[1], wanted[1])), where


def train(rank: int, wrap: Any, module_class: type) -> Result:
    """Two micro-batches a step; who has no data parallelism of this kind sums up nothing."""
    model: Any = mlps(6, 3)
    for layer in model:
        wrap(layer)
    wrap(model)
    assert isinstance(model, module_class)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        for part in range(2):
            for module in model.modules():
                if isinstance(module, module_class):
                    module.set_requires_gradient_sync(part == 1, recurse=False)
            losses.append(model(batch(2 * step + part, rank, 6)).pow(2).mean())
            losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    values = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return type(model).__mro__[1], [loss.detach() for loss in losses] + list(values.values())


def train_sharded(rank: int) -> Result:
    return train(rank, fsdp.fully_shard, fsdp.FSDPModule)


def train_replicated(rank: int) -> Result:
    return train(rank, replicate_with_fsdp.replicate, replicate_with_fsdp.ReplicateModule)


def train_in_stages(rank: int) -> Result:
    """A pipeline of two stages, each replicated over a mesh of one rank."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    stage: Any = mlps(6, 3)[rank : rank + 1]
    replicate_with_fsdp.replicate(stage, mesh=mesh["dp"])
    pipeline = PipelineStage(stage, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(pipeline, 4, loss_fn=lambda output, target: (output - target).pow(2).mean())
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.05)
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        data = {"target": batch(step + 50, 0, 6, rows=8), "losses": losses} if rank == 1 else {}
        schedule.step(*([batch(step, 0, 6, rows=8)] if rank == 0 else []), **data)
        assert all(p.grad.to_local().abs().sum() > 0 for p in stage.parameters()), "every step has gradients"
        optimizer.step()
        optimizer.zero_grad()
    values = [value.to_local().clone() for value in stage.state_dict().values()]
    return type(stage).__mro__[1], [loss.detach() for loss in losses] + values


def both_sides(rank: int) -> None:
    programs = {train_sharded: "FSDPModule", train_replicated: "ReplicateModule", train_in_stages: "ReplicateModule"}
    wanted = {program: program(rank) for program in programs}

    def check(engine: Any, when: str) -> None:
        for program, name in programs.items():
            assert_same(program(rank), wanted[program], getattr(engine, name), f"{program.__name__} {when}")

    shardwise.install()
    check(shardwise, "after install()")
    # Who has torch's from before trains with it as before.
    for function, module_class, program in (
        (TORCH.fully_shard, TORCH.FSDPModule, train_sharded),
        (TORCH.replicate, TORCH.ReplicateModule, train_replicated),
    ):
        assert_same(train(rank, function, module_class), wanted[program], module_class, "with torch's")
    shardwise.uninstall()
    check(TORCH, "after uninstall()")


class TestInstall:
    def test_a_program_trains_the_same_on_both_sides(self) -> None:
        run_ranks(2, both_sides)
