"""One rank that trains a GPT over Gloo: benchmarks/cpp/rank_steps.cpp with torch's wrappings, from Python.

usage: rank_steps.py --wrap fsdp2 --rank 0 --world 2 --store FILE --layers 6 --width 384
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meters import Meters
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "python"))
from model import Gpt, GptOptions, initialize


class Collectives(TorchDispatchMode):
    """Counts what goes to a process group. Slows the step down."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def distribute(model: Gpt, wrap: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    units: dict[str, Callable[[nn.Module], Any]] = {
        "fsdp2": lambda module: fully_shard(module, mesh=mesh),
        "fsdp2_keep": lambda module: fully_shard(module, mesh=mesh, reshard_after_forward=False),
        "torch_replicate": lambda module: replicate(module, mesh=mesh),
        "replicate": lambda module: shardwise.replicate(module, mesh=mesh),
    }
    if wrap == "none":
        return model
    if wrap == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for block in model.blocks:
        units[wrap](block)
    units[wrap](model)
    return model


def status_mib(name: str) -> float:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self._resident_before = status_mib("VmRSS")
        self._meters = Meters()
        self._meters.watch_memory()
        shape = GptOptions(layers=options.layers, width=options.width)
        model = Gpt(shape)
        initialize(model, 1)
        self._parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
        self._model = distribute(model, options.wrap)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._random = torch.Generator().manual_seed(options.rank + 1)
        self._vocabulary = shape.vocabulary

    def step(self, text: Tensor) -> None:
        self._optimizer.zero_grad()
        scores = self._model(text[:, :-1])
        F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()).backward()
        self._optimizer.step()

    def text(self) -> Tensor:
        return torch.randint(0, self._vocabulary, (1, 65), generator=self._random)

    def run(self, steps: int) -> dict[str, Any]:
        wall, cpu = [], []
        self._meters.forget_peak()
        for _ in range(steps):
            text = self.text()
            dist.barrier()
            wall_begin, cpu_begin = time.monotonic(), time.process_time()
            self.step(text)
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

    def count(self) -> dict[str, int]:
        with Collectives() as collectives:
            self.step(self.text())
        return dict(collectives.counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.FileStore(options.store, options.world)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.world)
    rank = Rank(options)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(rank.count() if line.strip() == "count" else rank.run(int(line))), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
