"""What a rank allocates in a step: benchmarks/cpp/memory_steps.cpp from Python, with torch's wrappings beside ours.

usage: memory_steps.py --wrap ddp --layers 4 --width 384 --rank 0 --world 2 --store FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meters import Meters, status_mib
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise._state import unit_of

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "python"))
from model import Gpt, GptOptions, initialize

STEPS, TEXT = 6, 8
OURS = ("fully_shard", "fully_shard_keep", "replicate")


def wrap(model: Gpt, name: str, mesh: DeviceMesh) -> nn.Module:
    units: dict[str, Callable[[nn.Module], Any]] = {
        "fsdp2": lambda module: fully_shard(module, mesh=mesh),
        "fsdp2_keep": lambda module: fully_shard(module, mesh=mesh, reshard_after_forward=False),
        "torch_replicate": lambda module: replicate(module, mesh=mesh),
        "fully_shard": lambda module: shardwise.fully_shard(module, mesh=mesh),
        "fully_shard_keep": lambda module: shardwise.fully_shard(module, mesh=mesh, reshard_after_forward=False),
        "replicate": lambda module: shardwise.replicate(module, mesh=mesh),
    }
    if name == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for block in model.blocks:
        units[name](block)
    units[name](model)
    return model


def begin(options: argparse.Namespace) -> None:
    store = dist.FileStore(options.store, options.world)
    backend = "shardwise" if options.wrap in OURS else "gloo"
    dist.init_process_group(backend, store=store, rank=options.rank, world_size=options.world)


def run(options: argparse.Namespace) -> dict[str, Any]:
    begin(options)
    mesh = init_device_mesh("cpu", (options.world,), mesh_dim_names=("ranks",))
    resident_before = status_mib("VmRSS")
    meters = Meters()
    meters.watch_memory()
    shape = GptOptions(layers=options.layers, width=options.width)
    gpt = Gpt(shape)
    initialize(gpt, 1)
    parameter_bytes = 4 * sum(parameter.numel() for parameter in gpt.parameters())
    model = wrap(gpt, options.wrap, mesh)
    del gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ours = options.wrap in OURS
    text = torch.randint(0, shape.vocabulary, (1, TEXT + 1))
    result: dict[str, Any] = {"parameter_bytes": parameter_bytes}
    backward_peaks = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        pieces = meters.allocations()
        buffers = unit_of(model).counters()["allocations"] if ours else 0
        meters.forget_peak()
        scores = model(text[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        result["forward_peak"] = meters.peak_bytes()
        meters.forget_peak()
        loss.backward()
        del scores, loss
        backward_peaks.append(meters.peak_bytes())
        result["allocations"] = meters.allocations() - pieces
        if ours:
            result["buffers"] = unit_of(model).counters()["allocations"] - buffers
        optimizer.step()
    # A sum that is late holds gradients back in some steps.
    result["backward_peak"] = min(backward_peaks[2:])
    result["after_step"] = meters.bytes()
    result["resident_mib"] = status_mib("VmHWM") - resident_before
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file that all ranks share")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(options)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
