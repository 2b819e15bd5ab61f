"""Trainings that are divided among ranks in several ways, and saved."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from engine import Engine, ours
from layouts import grid
from meshes import shared_mesh
from models import whole
from tensor_parallel import parallelize
from torch import nn
from training_models import mlps

WIDTH = 5
#: The dtypes that safetensors knows, but for those smaller than a byte.
OF_SAFETENSORS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


def wrap_each(model: nn.Module, wrap: Callable[..., Any], **options: Any) -> None:
    for module in model.modules():
        if module is not model and hasattr(module, "in_proj"):
            wrap(module, **options)
    wrap(model, **options)


def sharded(engine: Engine, model: Any) -> None:
    wrap_each(model, engine.fully_shard)


def on_grid(engine: Engine, model: Any) -> None:
    wrap_each(model, engine.fully_shard, mesh=grid())


def mixed(engine: Engine, model: Any) -> None:
    mesh = shared_mesh((dist.get_world_size(),))
    engine.replicate(model[-1], mesh=mesh)
    for module in (model[-2], model):
        engine.fully_shard(module, mesh=mesh)


def tensor_parallel(engine: Engine, model: Any) -> None:
    mesh = shared_mesh((dist.get_world_size() // 2, 2), ("data", "tensor"))
    parallelize(model[2:], mesh["tensor"])
    wrap_each(model, engine.fully_shard, mesh=mesh["data"])


@dataclass(frozen=True)
class Division:
    """How a model is divided among the ranks of a world."""

    name: str
    world: int
    wrap: Callable[[Engine, Any], Any]
    #: Ranks that see the same data.
    alike: int = 1


DIVISIONS = {
    division.name: division
    for division in (
        Division("plain", 1, lambda engine, model: model),
        Division("rows of 2", 2, sharded),
        Division("rows of 3", 3, sharded),
        Division("one unit of 4", 4, lambda engine, model: engine.fully_shard(model)),
        Division("2 copies of 2", 4, on_grid),
        Division("copies", 2, lambda engine, model: engine.replicate(model)),
        Division("mixed", 2, mixed),
        Division("2 x 2 with tensor parallelism", 4, tensor_parallel, alike=2),
        Division("8", 8, sharded),
    )
}


WORLDS = {name: division.world for name, division in DIVISIONS.items()}


def make() -> Any:
    """With a buffer of whole numbers, and a parameter that is not trained."""
    model = mlps(WIDTH, 3, nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH))
    model.register_buffer("count", torch.arange(5))
    model[0].weight.requires_grad_(False)
    return model


class Run:
    """A model on its ranks, with an optimizer."""

    def __init__(self, name: str, rank: int, lr: float = 0.02, engine: Engine | None = None) -> None:
        division = DIVISIONS[name]
        self.model, self.data = make(), rank // division.alike
        division.wrap(engine or ours(), self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.1)

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            self.optimizer.zero_grad()
            numbers = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + self.data))
            self.model(numbers).pow(2).mean().backward()
            self.optimizer.step()
        return self

    def spoil(self) -> Run:
        spoil(self.model)
        return self

    def whole(self) -> dict[str, Any]:
        return whole_of(self.model, self.optimizer)


@torch.no_grad()
def spoil(model: nn.Module) -> Any:
    """With other values than any that are saved."""
    for tensor in model.state_dict().values():
        tensor.fill_(1)
    return model


def whole_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    found: dict[str, Any] = dict(model.state_dict())
    if optimizer is not None:
        state = optimizer.state_dict()
        for key, values in state["state"].items():
            found |= {f"{key}.{name}": value for name, value in values.items()}
        # Torch makes lists of tuples that it sends to others.
        found["groups"] = json.dumps(state["param_groups"])
    return {
        name: whole(value).clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in found.items()
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value, f"{name}: {found[name]} for {value}"


def assert_same_bytes(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Not all dtypes can be compared, but bytes can."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    mine, theirs = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (found, expected))
    assert torch.equal(mine, theirs), name
