"""What torch's tensor and pipeline parallelism cost the host: benchmarks/cpp/host_parallelism.cpp with torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

PIECE = 4


class Pair(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, hidden)
        self.down = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x))


def divided(blocks: int, ranks: int) -> nn.Module:
    model = nn.Sequential(*(Pair(PIECE * ranks) for _ in range(blocks)))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for pair in model:
        parallelize_module(pair, mesh, plan)
    return model


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).sum()


def microbatches(blocks: int, first: nn.Module, second: nn.Module) -> Callable[[], None]:
    x = torch.ones(8 * blocks, 4)

    def step() -> None:
        for part in x.chunk(blocks):
            between = first(part)
            given = between.detach().requires_grad_()
            loss(second(given), part).backward()
            between.backward(given.grad)

    return step


def pipeline(blocks: int, modules: list[nn.Module]) -> Callable[[], None]:
    x = torch.ones(8 * blocks, 4)
    part = torch.ones(8, 4)
    stages = [
        PipelineStage(module, number, 2, torch.device("cpu"), input_args=(part,), output_args=(module(part),))
        for number, module in enumerate(modules)
    ]
    schedule = ScheduleInterleaved1F1B(stages, blocks, loss_fn=loss, scale_grads=False)
    return lambda: schedule.step(x, target=x)


def parallel_steps(
    blocks: int, ranks: int, training: Callable[[nn.Module], Callable[[], Any]]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each with its name, in a fake process group of its own. `training` gives the step of a model."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    yield "layers_none", training(nn.Sequential(*(Pair(PIECE) for _ in range(blocks))))
    yield "torch_layers", training(divided(blocks, ranks))
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    yield "microbatches_none", microbatches(blocks, *modules)
    yield "torch_microbatches", pipeline(blocks, modules)
    dist.destroy_process_group()
