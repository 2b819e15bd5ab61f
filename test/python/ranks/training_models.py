"""Models and programs that the rows of replicate_training and fully_shard_training share."""

from __future__ import annotations

from typing import Any

import torch
from models import batch, mlp
from parity import Program
from torch import nn
from torch.distributed.tensor import Shard

#: The widths of models that are one group; not all can be cut evenly.
WIDTHS = [(7, 15, 3), (16, 17, 8), (32, 16, 8)]
#: What can be said of when full copies are freed, which changes no result.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "fully_shard": [{"reshard_after_forward": reshard} for reshard in (True, False, None)],
    "replicate": [{}],
}


def largest(parameter: nn.Parameter) -> Shard:
    """Along the largest dimension."""
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


def batch_for(model: nn.Module, number: int, rank: int, width: int) -> torch.Tensor:
    """Data in the dtype of the model."""
    return batch(number, rank, width).to(next(model.parameters()).dtype)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 4 * width)
        self.out_proj = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out_proj(torch.relu(self.in_proj(x))))


def mlps(width: int, count: int, *before: nn.Module) -> nn.Sequential:
    """Several of them, perhaps with other layers before."""
    torch.manual_seed(7)
    model = nn.Sequential(*before, *[Mlp(width) for _ in range(count)])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 / width**0.5)
    return model


def mlp_program(widths: tuple[int, ...], **settings: Any) -> Program:
    """Linear layers with tanh between them."""
    return Program(
        lambda: mlp(*widths),
        lambda model, number, rank: model(batch_for(model, number, rank, widths[0])).pow(2).mean(),
        **settings,
    )


def non_root_program() -> Program:
    """Three MLPs. Every second time the first is run alone, with the optimizer's step of all in between."""

    def loss(model: Any, number: int, rank: int) -> torch.Tensor:
        x = batch(number, rank, 16)
        return (model(x) if number % 2 == 0 else model[0](x)).sum()

    return Program(lambda: mlps(16, 3), loss)


class Twice(nn.Module):
    """One of its modules is called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(5, 5)
        self.outer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)) + torch.sigmoid(self.inner(x * 0.5)))


def twice_program() -> Program:
    return Program(Twice, lambda model, number, rank: model(batch(number, rank, 5)).pow(2).sum())
