"""One rank that trains a GPT: benchmarks/cpp/rank_steps.cpp with torch's wrappings, from Python.

usage: rank_steps.py --wrap fsdp2 --rank 0 --world 2 --store FILE --layers 6 --width 384 --heads 6
                     [--device cuda] [--batch 1] [--length 64] [--modelled]

Each line on its input is a number of steps, or a word; the answer is a line of JSON. With --modelled it is alone: the
other ranks are not there, and the wire to them is as slow as `speed MICROSECONDS MEGABYTES` tells.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from device import Device
from meters import status_mib
from peers_model import ModelledPeers
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from wrappings import DeepSpeedSteps, Steps, back_end_of, make_model

import shardwise


class Collectives(TorchDispatchMode):
    """Counts what goes to a process group. Slows the step down."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))


class Rank:
    def __init__(self, options: argparse.Namespace, device: Device, peers: ModelledPeers | None) -> None:
        self._resident_before = status_mib("VmRSS")
        self._device = device
        self._peers = peers
        self._shape = (options.batch, options.length + 1)
        with device.device:
            model = make_model(options.layers, options.width, options.heads, options.length)
        self._parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
        deepspeed = options.wrap == "deepspeed"
        self._steps: Steps | DeepSpeedSteps = (
            DeepSpeedSteps(model) if deepspeed else Steps(model, options.wrap, getattr(torch, options.dtype))
        )
        self._random = torch.Generator().manual_seed(options.rank + 1)
        self._vocabulary = model.bytes.num_embeddings

    def text(self) -> Tensor:
        return torch.randint(0, self._vocabulary, self._shape, generator=self._random).to(self._device.device)

    def run(self, steps: int) -> dict[str, Any]:
        wall, host, cpu = [], [], []
        self._device.forget_peak()
        busy = self._peers.busy_seconds() if self._peers else 0.0
        for _ in range(steps):
            text = self.text()
            dist.barrier()
            self._device.synchronize()
            wall_begin, cpu_begin = time.monotonic(), time.process_time()
            self._steps.step(text)
            host.append(time.monotonic() - wall_begin)
            self._device.synchronize()
            wall.append(time.monotonic() - wall_begin)
            cpu.append(time.process_time() - cpu_begin)
        return {
            "seconds": wall,
            "host_seconds": host,
            "cpu_seconds": cpu,
            "busy_seconds": (self._peers.busy_seconds() - busy) / steps if self._peers else 0.0,
            "parameter_bytes": self._parameter_bytes,
            "tensor_bytes": self._device.bytes(),
            "tensor_peak_bytes": self._device.peak_bytes(),
            "resident_before_mib": self._resident_before,
            "resident_peak_mib": status_mib("VmHWM"),
        }

    def count(self) -> dict[str, Any]:
        with Collectives() as collectives:
            self._steps.step(self.text())
        return dict(collectives.counts)

    def plan(self) -> dict[str, Any]:
        return {"units": shardwise.plan(self._steps.model).units}

    def copies(self) -> dict[str, Any]:
        text = self.text()
        return self._device.copies(lambda: self._steps.step(text))

    def graph(self) -> dict[str, Any]:
        text = self.text()
        return self._device.replayed(lambda: self._steps.passes(text))

    def speed(self, microseconds: str, megabytes: str) -> dict[str, Any]:
        assert self._peers
        self._peers.set_speed(float(microseconds), float(megabytes))
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", required=True)
    parser.add_argument("--store", required=True)
    for number in ("rank", "world", "layers", "width", "heads"):
        parser.add_argument(f"--{number}", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="to compute in")
    parser.add_argument("--modelled", action="store_true")
    parser.add_argument("--peers", help="a folder with packages that are measured beside")
    options = parser.parse_args()
    if options.peers:
        sys.path.append(options.peers)
    torch.set_num_threads(1)
    device = Device(options.device, options.rank)
    peers = ModelledPeers(str(device.device)) if options.modelled else None
    if peers:
        dist.init_process_group(peers.name, store=FakeStore(), rank=options.rank, world_size=options.world)
    else:
        store = dist.FileStore(options.store, options.world)
        back_end = device.back_end(back_end_of(options.wrap))
        dist.init_process_group(back_end, store=store, rank=options.rank, world_size=options.world)
    rank = Rank(options, device, peers)
    orders: dict[str, Callable[..., dict[str, Any]]] = {
        name: getattr(rank, name) for name in ("count", "plan", "copies", "graph", "speed")
    }
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order, *words = line.split()
        print(json.dumps(orders[order](*words) if order in orders else rank.run(int(order))), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
