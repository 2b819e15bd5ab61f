"""One rank of several that train a small model in many ways, beside gradients averaged by hand and torch's own engine.

usage: torchrun --nproc-per-node N nccl_ranks.py --device cuda|cpu [--direct]

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
from dataclasses import dataclass, field
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


#: Torch pins memory for GPUs alone.
OFFLOADED = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Way:
    """How a model is wrapped and trained. Torch's engine does the same to the bit; with `by_hand` gradients averaged by
    hand are nearly the same."""

    options: dict[str, Any] = field(default_factory=dict)
    engine: Callable[..., Any] = shardwise.fully_shard
    by_hand: bool = False
    mesh: str = "one axis"
    microbatches: int = 1
    clip: bool = False
    recomputes: bool = False
    in_nccls_memory: bool = False


WAYS = {
    "replicate": Way(engine=shardwise.replicate, by_hand=True),
    "fully_shard": Way(by_hand=True),
    "beside torch, float32": Way(),
    "beside torch, kept": Way({"reshard_after_forward": False}),
    "beside torch, bf16": Way({"mp_policy": BF16}),
    "beside torch, bf16 sums": Way({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
    "beside torch, offloaded": Way({"offload_policy": OFFLOADED}),
    "beside torch, offloaded, bf16": Way({"offload_policy": OFFLOADED, "mp_policy": BF16}),
    "beside torch, accumulated": Way(microbatches=3),
    "beside torch, clipped": Way(clip=True),
    "beside torch, checkpointed": Way(recomputes=True),
    "beside torch, two axes, copies": Way(mesh="copies"),
    "beside torch, two axes, shards": Way(mesh="shards"),
    "in NCCL's own memory": Way(by_hand=True, in_nccls_memory=True),
}


def train(model: nn.Module, device: torch.device, way: Way, averages: bool = False) -> list[torch.Tensor]:
    """The losses of this rank, then the gradients and parameters: whole by hand, else as this rank holds them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for last in [False] * (way.microbatches - 1) + [True]:
            if way.microbatches > 1:
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            x = torch.randn(16, WIDTH, generator=random).to(device)
            loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
            loss.backward()
            found.append(loss.detach().cpu())
        for parameter in model.parameters() if averages else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        if way.clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            found.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).detach().cpu())
        optimizer.step()
    for tensor in [*(p.grad for p in model.parameters()), *model.parameters()]:
        assert tensor is not None
        local = tensor.to_local() if isinstance(tensor, DTensor) and not way.by_hand else tensor
        found.append((local.full_tensor() if isinstance(local, DTensor) else local).detach().cpu())
    return found


def meshes(device: torch.device) -> dict[str, DeviceMesh]:
    world = dist.get_world_size()
    return {
        "one axis": init_device_mesh(device.type, (world,), mesh_dim_names=("ranks",)),
        "copies": init_device_mesh(device.type, (world, 1), mesh_dim_names=("copies", "shards")),
        "shards": init_device_mesh(device.type, (1, world), mesh_dim_names=("copies", "shards")),
    }


def wrapped(engine: Callable[..., Any], device: torch.device, mesh: DeviceMesh, way: Way) -> nn.Module:
    model = make_model(device, way.recomputes)
    for module in (*model, model):
        engine(module, mesh=mesh, **way.options)
    for module in (*model, model) if way.in_nccls_memory else ():
        module.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
    return model


def compare(name: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], exactly: bool) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **tolerance, msg=lambda text: f"{name}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--direct", action="store_true", help="on GPUs: through the host's memory, without NCCL")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    of_cuda = f"cpu:gloo,cuda:{'shardwise' if options.direct else 'nccl'}"
    dist.init_process_group(of_cuda if options.device == "cuda" else "shardwise")
    mesh_by_name = meshes(device)
    averaged = train(make_model(device), device, Way(by_hand=True), averages=True)
    failed = []
    for name, way in WAYS.items():
        if way.in_nccls_memory and (options.device == "cpu" or options.direct):
            continue
        begin = time.monotonic()
        try:
            mesh = mesh_by_name[way.mesh]
            found = train(wrapped(way.engine, device, mesh, way), device, way)
            expected = averaged if way.by_hand else train(wrapped(torchs, device, mesh, way), device, way)
            compare(name, found, expected, exactly=not way.by_hand)
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
