"""C++ models that CMake's target bound_models makes known to Python, and modules of Python that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import devices
import torch
from models import Beside, assert_close, batch, local
from parity import nothing
from torch import nn
from torch.nn import functional
from training_models import Mlp

import shardwise
from shardwise._state import unit_of


def models() -> Any:
    """The extension module; `make test` builds it."""
    return devices.bound("bound_models")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * self.down(functional.gelu(self.up(self.norm(x))))

    def reversed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.matmul(self.down.weight).matmul(self.up.weight)) + self.norm.weight


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, 0.5)
        return self.head(x)


class Chain(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), *(Mlp(width) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


TWINS: dict[str, Any] = {"Stack": Stack, "Chain": Chain}


def twin(name: str, *sizes: int) -> tuple[Any, nn.Module]:
    """A C++ model, and a module of Python with the same values under the same names."""
    bound, plain = getattr(models(), name)(*sizes), TWINS[name](*sizes)
    plain.load_state_dict(dict(bound.named_parameters()))
    return bound, plain


def tokens(number: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1000 * number + rank))


def stack_loss(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(tokens(number, rank)).pow(2).mean()


def chain_loss(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(batch(number, rank, 6)).pow(2).sum()


def wrap_stack(stack: Any, **options: Any) -> None:
    """Its two blocks, then itself."""
    for index in range(2):
        assert shardwise.fully_shard(stack.block(index), **options) is stack.block(index)
    assert shardwise.fully_shard(stack, **options) is stack


def counted(model: Any) -> dict[str, int]:
    """What the units of this module and those below did so far."""
    return unit_of(model).counters()


class Pair(Beside):
    """A C++ model that is wrapped, and its twin. Its parameters are this rank's pieces; those of a part in Python are
    DTensors."""

    def __init__(
        self,
        bound: Any,
        plain: nn.Module,
        loss: Callable[[Any, int, int], torch.Tensor],
        shards: int | None = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        """`shards`: how many ranks hold everything together; 1 where each does."""
        super().__init__(bound, nothing, loss, partial(torch.optim.AdamW, lr=0.05, eps=0.1), plain, place)
        self.shards = shards or self.ranks
        self.dims: dict[str, int] = {}

    def check(self, what: str) -> None:
        names = [[name for name, _ in model.named_parameters()] for model in (self.model, self.plain)]
        assert names[0] == names[1]
        super().check(f"{what}, rank {self.rank}")

    def compare(self, name: str, mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        dim, index = self.dims.get(name, 0), self.rank % self.shards
        pieces = theirs.chunk(self.shards, dim)
        assert_close(local(mine), pieces[index] if index < len(pieces) else theirs.narrow(dim, 0, 0), what)
