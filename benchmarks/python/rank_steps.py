"""One rank that trains a GPT over Gloo: benchmarks/cpp/rank_steps.cpp with torch's wrappings, from Python.

usage: rank_steps.py --wrap fsdp2 --rank 0 --world 2 --store FILE --layers 6 --width 384

Each line on its input is a number of steps, or `count` or `plan`; the answer is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meters import Meters, status_mib
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "python"))
from model import Gpt, GptOptions, initialize

#: Ours over torch's process groups; else over those of our own transport.
OVER_GLOO = "_over_gloo"
OURS = ("fully_shard", "fully_shard_keep", "hsdp", "replicate")


def is_ours(wrap: str) -> bool:
    return wrap.removesuffix(OVER_GLOO) in OURS


class Collectives(TorchDispatchMode):
    """Counts what goes to a process group. Slows the step down."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def fully_sharded(model: Gpt, unit: Callable[[nn.Module], Any]) -> nn.Module:
    for block in model.blocks:
        unit(block)
    unit(model)
    return model


def mesh_of(wrap: str) -> DeviceMesh:
    world = dist.get_world_size()
    if wrap.startswith("hsdp") or wrap == "torch_hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("ranks",))


def distribute(model: Gpt, wrap: str) -> nn.Module:
    if wrap == "none":
        return model
    if wrap == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = mesh_of(wrap)
    units: dict[str, Callable[[nn.Module], Any]] = {
        "fsdp2": lambda module: fully_shard(module, mesh=mesh),
        "fsdp2_keep": lambda module: fully_shard(module, mesh=mesh, reshard_after_forward=False),
        "torch_hsdp": lambda module: fully_shard(module, mesh=mesh),
        "torch_replicate": lambda module: replicate(module, mesh=mesh),
        "fully_shard": lambda module: shardwise.fully_shard(module, mesh=mesh),
        "fully_shard_keep": lambda module: shardwise.fully_shard(module, mesh=mesh, reshard_after_forward=False),
        "hsdp": lambda module: shardwise.fully_shard(module, mesh=mesh),
        "replicate": lambda module: shardwise.replicate(module, mesh=mesh),
    }
    return fully_sharded(model, units[wrap.removesuffix(OVER_GLOO)])


def optimizer_of(model: nn.Module, wrap: str) -> Any:
    usual = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return shardwise.local_optimizer(usual) if is_ours(wrap) else usual


class Steps:
    """A model, how it is wrapped, and a step of it."""

    def __init__(self, model: Gpt, wrap: str) -> None:
        self.model = distribute(model, wrap)
        self._optimizer = optimizer_of(self.model, wrap)

    def step(self, text: Tensor) -> None:
        self._optimizer.zero_grad()
        loss_of(self.model, text).backward()
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

    def step(self, text: Tensor) -> None:
        self.model.backward(loss_of(self.model, text))
        self.model.step()


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self._resident_before = status_mib("VmRSS")
        self._meters = Meters()
        self._meters.watch_memory()
        shape = GptOptions(layers=options.layers, width=options.width, heads=options.heads)
        model = Gpt(shape)
        initialize(model, 1)
        self._parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
        deepspeed = options.wrap == "deepspeed"
        self._steps: Steps | DeepSpeedSteps = DeepSpeedSteps(model) if deepspeed else Steps(model, options.wrap)
        self._random = torch.Generator().manual_seed(options.rank + 1)
        self._vocabulary = shape.vocabulary

    def text(self) -> Tensor:
        return torch.randint(0, self._vocabulary, (1, 65), generator=self._random)

    def run(self, steps: int) -> dict[str, Any]:
        wall, cpu = [], []
        self._meters.forget_peak()
        for _ in range(steps):
            text = self.text()
            dist.barrier()
            wall_begin, cpu_begin = time.monotonic(), time.process_time()
            self._steps.step(text)
            wall.append(time.monotonic() - wall_begin)
            cpu.append(time.process_time() - cpu_begin)
        return {
            "seconds": wall,
            "cpu_seconds": cpu,
            "parameter_bytes": self._parameter_bytes,
            "tensor_bytes": self._meters.bytes(),
            "tensor_peak_bytes": self._meters.peak_bytes(),
            "resident_before_mib": self._resident_before,
            "resident_peak_mib": status_mib("VmHWM"),
        }

    def count(self) -> dict[str, Any]:
        with Collectives() as collectives:
            self._steps.step(self.text())
        return dict(collectives.counts)

    def plan(self) -> dict[str, Any]:
        return {"units": shardwise.plan(self._steps.model).units}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", required=True)
    parser.add_argument("--store", required=True)
    for number in ("rank", "world", "layers", "width", "heads"):
        parser.add_argument(f"--{number}", type=int, required=True)
    parser.add_argument("--peers", help="a folder with packages that are measured beside")
    options = parser.parse_args()
    if options.peers:
        sys.path.append(options.peers)
    torch.set_num_threads(1)
    store = dist.FileStore(options.store, options.world)
    backend = "shardwise" if options.wrap in OURS else "gloo"
    dist.init_process_group(backend, store=store, rank=options.rank, world_size=options.world)
    rank = Rank(options)
    orders: dict[str, Callable[[], dict[str, Any]]] = {"count": rank.count, "plan": rank.plan}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = line.strip()
        print(json.dumps(orders[order]() if order in orders else rank.run(int(order))), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
