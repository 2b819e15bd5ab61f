"""A model in pipeline stages, the schedules that run them, and the same model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from models import batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

#: The schedule and how many stages a rank has.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "GPipe": (schedules.ScheduleGPipe, 1),
    "1F1B": (schedules.Schedule1F1B, 1),
    "Interleaved1F1B": (schedules.ScheduleInterleaved1F1B, 2),
    "LoopedBFS": (schedules.ScheduleLoopedBFS, 2),
    "InterleavedZeroBubble": (schedules.ScheduleInterleavedZeroBubble, 2),
}
LAYERS = 4
MICROBATCHES = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net1 = nn.Linear(width, 2 * width)
        self.net2 = nn.Linear(2 * width, width)
        self.seen: set[tuple[torch.dtype, torch.dtype]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add((x.dtype, self.net1.weight.dtype))
        return x + self.net2(torch.tanh(self.net1(x)))


class Chunk(nn.Module):
    """Some layers of the model, each under its name in the whole."""

    def __init__(self, width: int, layers: Iterable[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for layer in layers:
            torch.manual_seed(100 + layer)
            self.layers[str(layer)] = Block(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def stages_of(name: str, mesh: DeviceMesh) -> list[int]:
    return [mesh.get_local_rank() + part * mesh.size() for part in range(SCHEDULES[name][1])]


def chunks_of(name: str, mesh: DeviceMesh, width: int) -> list[Chunk]:
    """What this rank of a pipeline has of the model."""
    each = LAYERS // (SCHEDULES[name][1] * mesh.size())
    return [Chunk(width, range(stage * each, (stage + 1) * each)) for stage in stages_of(name, mesh)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target.float()).pow(2).mean()


class Pipeline:
    """A rank of a pipeline: step() does a forward and a backward of all microbatches."""

    def __init__(self, name: str, chunks: list[Any], mesh: DeviceMesh, scale_grads: bool) -> None:
        schedule, per_rank = SCHEDULES[name]
        group, total = mesh.get_group(), per_rank * mesh.size()
        stages = [
            PipelineStage(chunk, stage, total, torch.device("cpu"), group=group)
            for chunk, stage in zip(chunks, stages_of(name, mesh), strict=True)
        ]
        self.chunks = chunks
        self.is_last = stages[-1].is_last
        self._is_first = stages[0].is_first
        self._schedule = schedule(
            stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=loss_of, scale_grads=scale_grads
        )

    def step(self, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        """The losses of the microbatches, where the last stage is."""
        losses: list[torch.Tensor] = []
        inputs = [x] if self._is_first else []
        wanted: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
        self._schedule.step(*inputs, **wanted)
        return [loss.detach() for loss in losses]

    def assert_computed_in(self, dtype: torch.dtype) -> None:
        for chunk in self.chunks:
            for layer in chunk.layers.values():
                assert layer.seen == {(dtype, dtype)}, f"inputs and weights were {layer.seen}, for {dtype}"

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [pair for chunk in self.chunks for pair in chunk.named_parameters()]


class Masters:
    """A module that computes in a dtype, and its values in float32, for the optimizer."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.values = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
        self.module = module.to(dtype)

    def refresh(self) -> None:
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self.values[name])
                parameter.grad = None
        for value in self.values.values():
            value.grad = None

    def collect(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Adds the gradients, changed in float32, to those of the masters."""
        for name, parameter in self.module.named_parameters():
            assert parameter.grad is not None, name
            gradient = change(parameter.grad.float())
            seen = self.values[name]
            seen.grad = gradient if seen.grad is None else seen.grad + gradient
            parameter.grad = None


class SingleProcess:
    """The whole model; one process runs the microbatches of all replicas."""

    def __init__(self, width: int, dtype: torch.dtype, replicas: int, scale_grads: bool) -> None:
        self.dtype, self.replicas, self.width = dtype, replicas, width
        self.masters = Masters(Chunk(width, range(LAYERS)), dtype)
        self._scale = 1 / (replicas * (MICROBATCHES if scale_grads else 1))

    def step(self, number: int) -> list[list[torch.Tensor]]:
        """The losses of each replica."""
        self.masters.refresh()
        return [self._replica(*data(number, replica, self.width)) for replica in range(self.replicas)]

    def _replica(self, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            losses.append(loss_of(self.masters.module(part.to(self.dtype)), wanted))
            losses[-1].backward()
            self.masters.collect(lambda gradient: gradient * self._scale)
        return [loss.detach() for loss in losses]


def data(step: int, replica: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a replica, for all of its microbatches."""
    rows = 2 * MICROBATCHES
    return batch(step, replica, width, rows), batch(step + 500, replica, width, rows)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copies(chunks: list[Any]) -> list[Any]:
    return [copy.deepcopy(chunk) for chunk in chunks]


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, what: str, dtype: torch.dtype, exact: bool = True) -> None:
    """To the bit in float32 if exact; else within what sums in another order, or 16 bits, bring."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, f"{what}: {ours} for {theirs}"
    if dtype == torch.float32 and exact:
        assert torch.equal(ours, theirs), f"{what}: differs by {(ours - theirs).abs().max()}"
        return
    bound = 1e-5 if dtype == torch.float32 else 4e-2
    distance, size = (ours - theirs).double().norm(), theirs.double().norm()
    assert distance <= bound * size + 1e-8, f"{what}: {distance} apart, of {size}"
