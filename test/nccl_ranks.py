"""One rank of several that train a small model in each way, and compare with gradients that are averaged by hand.

usage: torchrun --nproc-per-node N nccl_ranks.py --device cuda|cpu

On GPUs over NCCL; ranks take the GPUs in turn. On the CPU over shardwise's own transport.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise

STEPS = 4
WIDTH = 32


def make_model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, 7), nn.ReLU(), nn.Linear(7, 1)]
    return nn.Sequential(*layers).to(device)


def train(model: nn.Module, device: torch.device, average: Callable[[], None]) -> list[torch.Tensor]:
    """The losses of this rank, then the whole parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, WIDTH, generator=random).to(device)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        average()
        optimizer.step()
        losses.append(loss.detach())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [*losses, *(parameter.detach() for parameter in whole)]


def by_hand(device: torch.device) -> list[torch.Tensor]:
    model = make_model(device)

    def average() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return train(model, device, average)


def wrapped(device: torch.device, wrap: Callable[..., Any], **options: Any) -> list[torch.Tensor]:
    model = make_model(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    for module in (model[0], model[2], model):
        wrap(module, mesh=mesh, **options)
    return train(model, device, lambda: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--wrong", action="store_true", help="change a result: the comparison must then fail")
    options = parser.parse_args()
    dist.init_process_group("nccl" if options.device == "cuda" else "shardwise")
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    expected = by_hand(device)
    ways: dict[str, Callable[[], list[torch.Tensor]]] = {
        "replicate": lambda: wrapped(device, shardwise.replicate),
        "fully_shard": lambda: wrapped(device, shardwise.fully_shard),
        "fully_shard, kept": lambda: wrapped(device, shardwise.fully_shard, reshard_after_forward=False),
    }
    for name, way in ways.items():
        found = way()
        if options.wrong:
            found[-1] = found[-1] + 1
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        if dist.get_rank() == 0:
            print(f"{name}: {dist.get_world_size()} ranks on {device.type} train as by hand", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
