"""What torch's wrappings cost the host: benchmarks/cpp/host_cost.cpp from Python, with the same model and steps.

usage: host_cost.py --blocks 8,32
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from meters import Meters
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise

PARAMETERS, WARM, FEW, MANY, TIMED = 9, 5, 1, 5, 40


class Block(nn.Module):
    """One operation a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [f"w{i}" for i in range(PARAMETERS)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.ones(8, 4)))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = x * getattr(self, name)
        return x


def with_blocks(wrap: Callable[[nn.Module], Any]) -> Callable[[nn.Sequential], nn.Module]:
    def apply(model: nn.Sequential) -> nn.Module:
        for block in model:
            wrap(block)
        wrap(model)
        return model

    return apply


def ddp(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def done(buffer: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    # The futures of the fake process group hold nothing, which DDP refuses: this communication is done at once.
    wrapped.register_comm_hook(None, lambda _, bucket: done(bucket.buffer()))
    return wrapped


def measure(meters: Meters, name: str, blocks: int, model: nn.Module) -> None:
    inputs = torch.ones(8, 4)

    def step() -> None:
        model(inputs).sum().backward()
        model.zero_grad()

    for _ in range(WARM):
        step()
    gc.collect()
    if meters.count_instructions():
        for steps in (FEW, MANY):
            meters.zero()
            for _ in range(steps):
                step()
            meters.dump(f"{name} {blocks} {steps}")
        return
    best = float("inf")
    for _ in range(TIMED):
        begin = time.thread_time()
        step()
        best = min(best, time.thread_time() - begin)
    print(name, blocks, best * 1e6, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", required=True, help="numbers with commas between them")
    sizes = [int(size) for size in parser.parse_args().blocks.split(",")]
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    wrappings: dict[str, Callable[[nn.Sequential], nn.Module]] = {
        "none": lambda model: model,
        "fsdp2": with_blocks(lambda module: fully_shard(module, mesh=mesh)),
        "fsdp2_keep": with_blocks(lambda module: fully_shard(module, mesh=mesh, reshard_after_forward=False)),
        "torch_replicate": with_blocks(lambda module: replicate(module, mesh=mesh)),
        "ddp": ddp,
        "replicate": with_blocks(lambda module: shardwise.replicate(module, mesh=mesh)),
    }
    meters = Meters()
    gc.disable()
    meters.start()
    for blocks in sizes:
        for name, wrap in wrappings.items():
            measure(meters, name, blocks, wrap(nn.Sequential(*(Block() for _ in range(blocks)))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
