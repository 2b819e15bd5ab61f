"""The row of fully_shard_training that only a GPU can show: a step is captured once and replayed."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from engine import TORCH, Engine, ours
from models import batch, local, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.testing import run_ranks

STEPS = 4


def wrapped(engine: Engine) -> nn.Sequential:
    model = mlp(16, 32, 8).to("cuda")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        engine.fully_shard(layer, mesh=mesh)
    engine.fully_shard(model, mesh=mesh)
    return model


def data(step: int) -> torch.Tensor:
    return batch(step, dist.get_rank(), 16).to("cuda")


def eager(engine: Engine) -> list[list[torch.Tensor]]:
    """Outputs and gradients of every step."""
    model = wrapped(engine)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        output = model(data(step))
        output.sum().backward()
        found.append([output.detach().clone(), *(local(p.grad).clone() for p in model.parameters())])
    return found


def captured_and_replayed(rank: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    expected = eager(TORCH)
    assert all(
        torch.equal(a, b)
        for one, two in zip(eager(ours()), expected, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    model = wrapped(ours())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    static = data(0)
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad()
            model(static).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        output = model(static)
        output.sum().backward()
    gradients = [local(p.grad) for p in model.parameters()]
    for step in range(STEPS):
        static.copy_(data(step))
        graph.replay()
        for found, wanted in zip([output, *gradients], expected[step], strict=True):
            assert torch.equal(found.detach(), wanted), f"step {step}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
class TestFullyShardCudaGraph:
    def test_two_layer_fully_shard_cudagraph(self) -> None:
        # With one GPU only an NCCL that is told to lets two ranks share it; a single rank has no collectives.
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        run_ranks(2 if shares else min(2, torch.cuda.device_count()), captured_and_replayed, backend="nccl")
