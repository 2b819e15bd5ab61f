"""One rank of several that train a small model in many ways, beside gradients averaged by hand and torch's own engine.

usage: torchrun --nproc-per-node N nccl_ranks.py --device cuda|cpu [--direct] [--only WORDS]

On GPUs, which ranks take in turn, over NCCL or the direct transport; on the CPU over the latter.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardwise

STEPS = 4
#: Seconds, after which every rank says where it is.
LIMIT = 70
WIDTH = 32
#: Odd sizes too: pieces are then uneven, and not all in words of 16 bytes.
HIDDEN = 3 * WIDTH + 1


class Block(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x))


def make_model(device: torch.device, recomputes: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(recomputes) for _ in range(3)), nn.Linear(WIDTH, 1)).to(device)


def train(model: nn.Module, device: torch.device, options: argparse.Namespace) -> list[torch.Tensor]:
    """The losses of this rank, then the gradients and parameters, as this rank holds them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for last in [False] * (options.microbatches - 1) + [True]:
            if options.microbatches > 1:
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            x = torch.randn(16, WIDTH, generator=random).to(device)
            loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
            loss.backward()
            found.append(loss.detach().cpu())
        if options.average:
            options.average(model)
        if options.clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            found.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).detach().cpu())
        optimizer.step()
    for tensor in [*(p.grad for p in model.parameters()), *model.parameters()]:
        assert tensor is not None
        local = tensor.to_local() if isinstance(tensor, DTensor) and not options.whole else tensor
        found.append((local.full_tensor() if isinstance(local, DTensor) else local).detach().cpu())
    return found


def average_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def meshes(device: torch.device) -> dict[str, DeviceMesh]:
    world = dist.get_world_size()
    return {
        "one axis": init_device_mesh(device.type, (world,), mesh_dim_names=("ranks",)),
        "copies": init_device_mesh(device.type, (world, 1), mesh_dim_names=("copies", "shards")),
        "shards": init_device_mesh(device.type, (1, world), mesh_dim_names=("copies", "shards")),
    }


def setting(**changes: Any) -> argparse.Namespace:
    usual = {"microbatches": 1, "clip": False, "average": None, "whole": False, "recomputes": False, "mesh": "one axis"}
    return argparse.Namespace(**{**usual, **changes})


#: Torch pins memory for GPUs alone.
OFFLOADED = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
#: Name, options of fully_shard(), and what else is different.
BESIDE_TORCH: dict[str, tuple[dict[str, Any], argparse.Namespace]] = {
    "float32": ({}, setting()),
    "kept": ({"reshard_after_forward": False}, setting()),
    "bf16": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, setting()),
    "bf16 sums": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, setting()),
    "offloaded": ({"offload_policy": OFFLOADED}, setting()),
    "offloaded, bf16": (
        {"offload_policy": OFFLOADED, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        setting(),
    ),
    "accumulated": ({}, setting(microbatches=3)),
    "clipped": ({}, setting(clip=True)),
    "checkpointed": ({}, setting(recomputes=True)),
    "two axes, copies": ({}, setting(mesh="copies")),
    "two axes, shards": ({}, setting(mesh="shards")),
}


def wrapped(
    engine: Callable[..., Any], device: torch.device, mesh: DeviceMesh, recomputes: bool, **options: Any
) -> Any:
    model = make_model(device, recomputes)
    for module in (*model, model):
        engine(module, mesh=mesh, **options)
    return model


def in_own_memory(model: Any) -> Any:
    for module in (*model, model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def compare(name: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], exactly: bool) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(
            one, other, **tolerance, msg=lambda text, index=index: f"{name}, tensor {index}: {text}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--direct", action="store_true", help="on GPUs: through the host's memory, without NCCL")
    parser.add_argument("--only", default="", help="the ways whose names have this in them")
    parser.add_argument("--wrong", action="store_true", help="change a result: the comparison must then fail")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    of_cuda = f"cpu:gloo,cuda:{'shardwise' if options.direct else 'nccl'}"
    dist.init_process_group(of_cuda if options.device == "cuda" else "shardwise")
    mesh_by_name = meshes(device)
    one_axis = mesh_by_name["one axis"]
    by_hand = setting(whole=True, average=average_by_hand)
    whole = setting(whole=True)
    expected = train(make_model(device), device, by_hand)

    def beside_torch(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        given, how = BESIDE_TORCH[name]
        results = [
            train(wrapped(engine, device, mesh_by_name[how.mesh], how.recomputes, **given), device, how)
            for engine in (shardwise.fully_shard, torchs)
        ]
        return results[0], results[1]

    ways: dict[str, Callable[[], tuple[list[torch.Tensor], list[torch.Tensor], bool]]] = {
        "replicate": lambda: (
            train(wrapped(shardwise.replicate, device, one_axis, False), device, whole), expected, False),
        "fully_shard": lambda: (
            train(wrapped(shardwise.fully_shard, device, one_axis, False), device, whole), expected, False),
        **{f"beside torch, {name}": lambda name=name: (*beside_torch(name), True) for name in BESIDE_TORCH},  # type: ignore[misc]
    }  # fmt: skip
    if options.device == "cuda" and not options.direct:
        ways["in NCCL's own memory"] = lambda: (
            train(in_own_memory(wrapped(shardwise.fully_shard, device, one_axis, False)), device, whole),
            expected,
            False,
        )
    failed = []
    for name, way in ways.items():
        if options.only not in name:
            continue
        begin = time.monotonic()
        try:
            found, wanted, exactly = way()
            if options.wrong:
                found[-1] = found[-1] + 1
            compare(name, found, wanted, exactly)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        if dist.get_rank() == 0:
            said = "FAILED" if name in failed else "the same"
            print(f"{said}: {name}: {dist.get_world_size()} ranks on {device.type}, {time.monotonic() - begin:.1f} s",
                  flush=True)  # fmt: skip
    dist.destroy_process_group()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
