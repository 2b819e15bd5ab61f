"""What wrapping costs the host in Python: benchmarks/cpp/host_cost.cpp with the same blocks and steps, and torch's own
wrappings beside ours.

usage: host_cost.py --sizes 8x9x2,32x9x2 [--only none,fully_shard]     blocks, parameters in each, ranks; the cases
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from meters import Meters
from parallelism import parallel_steps
from peers_model import InstantPeers
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise._state import unit_of

# Read when the first process group is made: torch's record of all collectives, with Python's stack at each, costs more
# than an engine.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

OURS = ("fully_shard", "fully_shard_keep", "replicate")
#: Steps of an optimizer, and the wrapping of what it holds.
STEPS = {"step_plain": "none", "step_dtensors": "fsdp2", "step_local": "fsdp2", "step_automatic": "fully_shard"}
WARM, FEW, MANY, TIMES, TIMED = 3, 1, 6, 4, 40


class Block(nn.Module):
    """One operation a parameter."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.names = [f"w{i}" for i in range(parameters)]
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


def passes(model: nn.Module) -> Callable[[], Any]:
    inputs = torch.ones(8, 4)

    def step() -> None:
        model(inputs).sum().backward()
        model.zero_grad()

    return step


def optimizer_step(model: nn.Module, local: bool) -> Callable[[], Any]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return (shardwise.local_optimizer(optimizer) if local else optimizer).step


def measure(meters: Meters, name: str, size: str, step: Callable[[], Any]) -> None:
    for _ in range(WARM):
        step()
    gc.collect()
    if meters.count_instructions():
        meters.start()
        step()
        for steps in (FEW, MANY) * TIMES:
            meters.zero()
            for _ in range(steps):
                step()
            meters.dump(f"{name} {size} {steps}")
        meters.stop()
        return
    best = float("inf")
    for _ in range(TIMED):
        begin = time.thread_time()
        step()
        best = min(best, time.thread_time() - begin)
    print(name, size, best * 1e6, flush=True)


def counted(model: nn.Module, step: Callable[[], Any]) -> dict[str, int]:
    """What the counters of our wrapping say of a step."""
    unit = unit_of(model)
    before = unit.counters()
    step()
    after = unit.counters()
    return {name: after[name] - before[name] for name in after}


def wrappings(ranks: int) -> dict[str, Callable[[nn.Sequential], nn.Module]]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    return {
        "none": lambda model: model,
        "fsdp2": with_blocks(lambda module: fully_shard(module, mesh=mesh)),
        "fsdp2_keep": with_blocks(lambda module: fully_shard(module, mesh=mesh, reshard_after_forward=False)),
        "torch_replicate": with_blocks(lambda module: replicate(module, mesh=mesh)),
        "ddp": ddp,
        "fully_shard": with_blocks(lambda module: shardwise.fully_shard(module, mesh=mesh)),
        "fully_shard_keep": with_blocks(
            lambda module: shardwise.fully_shard(module, mesh=mesh, reshard_after_forward=False)
        ),
        "replicate": with_blocks(lambda module: shardwise.replicate(module, mesh=mesh)),
    }


def measure_size(meters: Meters, peers: InstantPeers, size: str, only: list[str], with_steps: bool) -> None:
    blocks, parameters, ranks = map(int, size.split("x"))
    dist.init_process_group(peers.name, store=FakeStore(), rank=0, world_size=ranks)
    all_wrappings = wrappings(ranks)

    def made(wrapping: str) -> nn.Module:
        with peers.answering():
            return all_wrappings[wrapping](nn.Sequential(*(Block(parameters) for _ in range(blocks))))

    for name in all_wrappings:
        if not only or name in only:
            model = made(name)
            step = passes(model)
            measure(meters, name, size, step)
            if name in OURS:
                print("counters", name, size, json.dumps(counted(model, step)), flush=True)
    for name, wrapping in STEPS.items():
        if with_steps and (not only or name in only):
            shardwise.set_local_optimizers(name == "step_automatic")
            model = made(wrapping)
            measure(meters, name, size, optimizer_step(model, local=name == "step_local"))
            shardwise.set_local_optimizers(False)
    dist.destroy_process_group()
    for name, step in parallel_steps(blocks, ranks, passes) if with_steps else ():
        if not only or name in only:
            measure(meters, name, size, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", required=True, help="with commas between them")
    parser.add_argument("--only", default="", help="names with commas between them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    meters, peers = Meters(), InstantPeers()
    gc.disable()
    for number, size in enumerate(options.sizes.split(",")):
        measure_size(meters, peers, size, options.only.split(",") if options.only else [], with_steps=number == 0)


if __name__ == "__main__":
    main()
