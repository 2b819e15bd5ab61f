"""Saves and loads of one model and its AdamW by shardwise.checkpoint and by torch's DCP, in turns; prints JSON.

The ranks are processes of one machine with one disk. "plain" writes what this rank has to one file, as
`dd conv=fsync` does.
Seconds are those of the slowest rank; MiB are what a rank's resident set grew by at most, the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardwise
from shardwise import checkpoint
from shardwise.testing import run_ranks

WIDTH = 1024
BLOCK = 4 << 20


def make(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    for layer in model:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def write_plain(path: Path, tensors: list[torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            data = memoryview(tensor.numpy()).cast("B")
            for at in range(0, len(data), BLOCK):
                file.write(data[at : at + BLOCK])
        os.fsync(file.fileno())


def resident_peak() -> float:
    """MiB, since forget_peak()."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def forget_peak() -> float:
    """What is resident now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


class Turn:
    """Measures one rank's part, and keeps that of the slowest."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.memory: dict[str, float] = {}

    def take(self, name: str, act: Callable[[], Any]) -> Any:
        dist.barrier()
        before = forget_peak()
        begin = time.perf_counter()
        result = act()
        own = [time.perf_counter() - begin, resident_peak() - before]
        worst = torch.tensor(own, dtype=torch.double)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        self.seconds.setdefault(name, []).append(worst[0].item())
        # Of the first time, when nothing was kept from before.
        self.memory.setdefault(name, worst[1].item())
        return result


def measure(rank: int, folder: str, layers: int, rounds: int) -> dict[str, Any]:
    model, optimizer = make(layers)
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    tensors = [parameter.to_local().detach() for parameter in model.parameters()]
    tensors += [value.to_local() for kept in optimizer.state.values() for value in kept.values() if value.dim()]
    copies = [tensor.clone() for tensor in tensors]
    beside = dist.new_group(backend="gloo")
    saver, turn, root = checkpoint.AsyncSaver(), Turn(), Path(folder)

    def dcp_load(place: Path) -> None:
        read = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(read, checkpoint_id=place)
        set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])

    def copy() -> None:
        for to, tensor in zip(copies, tensors, strict=True):
            to.copy_(tensor)

    def once(place: Path) -> None:
        turn.take("plain", lambda: write_plain(place / f"plain-{rank}", tensors))
        turn.take("shardwise", lambda: checkpoint.save(place / "shardwise", model, optimizer))
        turn.take("dcp", lambda: dcp.save(state, checkpoint_id=place / "dcp"))
        turn.take("copy", copy)
        turn.take("shardwise stall", lambda: saver.save(place / "background", model, optimizer))
        turn.take("shardwise rest", saver.wait)
        background = place / "dcp-background"
        left = turn.take("dcp stall", lambda: dcp.async_save(state, checkpoint_id=background, process_group=beside))
        turn.take("dcp rest", left.result)
        turn.take("shardwise load", lambda: checkpoint.load(place / "shardwise", model, optimizer))
        turn.take("dcp load", lambda: dcp_load(place / "dcp"))

    for number in range(rounds + 1):
        # Each in a new place, as the checkpoints of a run are; they go when nothing is measured.
        place = root / str(number)
        if rank == 0:
            place.mkdir()
        dist.barrier()
        once(place)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
            os.sync()
        if number == 0:  # makes threads, process groups and memory that stay
            turn.seconds.clear()
    bytes_of_all = torch.tensor([sum(tensor.nbytes for tensor in tensors)])
    dist.all_reduce(bytes_of_all)
    return {"bytes": bytes_of_all.item(), "seconds": turn.seconds, "memory": turn.memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write; what it writes there goes again")
    parser.add_argument("--layers", type=int, default=16, help="of 1024 x 1024 parameters, 12.6 MB each with AdamW's")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    root = arguments.folder / f"checkpoints-{os.getpid()}"
    root.mkdir()
    try:
        found = run_ranks(
            arguments.world, measure, str(root), arguments.layers, arguments.rounds, timeout=3000, backend="gloo"
        )
    finally:
        shutil.rmtree(root)
    print(json.dumps(found[0]))


if __name__ == "__main__":
    main()
