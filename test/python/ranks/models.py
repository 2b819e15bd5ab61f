"""Models and data that the rank tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import shardwise
from shardwise._state import unit_of


class Branches(nn.Module):
    """A model of which a rank can leave parts out: `use` names the branches that take part in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use: Sequence[str]) -> torch.Tensor:
        hidden = self.first(x)
        for name in use:
            hidden = torch.tanh(self.get_submodule(name)(hidden))
        return hidden


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them; the same values on every rank and in the reference."""
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, rank: int, width: int, rows: int = 5) -> torch.Tensor:
    """Different for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator)


def reference_backward(world_size: int, loss_of_rank: Callable[[int], torch.Tensor | None]) -> None:
    """One process does what all ranks do: the gradient of the mean of their losses. None: a rank without a loss."""
    for rank in range(world_size):
        loss = loss_of_rank(rank)
        if loss is not None:
            (loss / world_size).backward()


def fill(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Gives each parameter this rank's part of the whole values."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        on = parameter.device_mesh
        source = DTensor.from_local(whole[name], on, [Replicate()] * on.ndim, run_check=False)
        with torch.no_grad():
            parameter.copy_(source.redistribute(placements=parameter.placements))


def assert_trained_alike(model: nn.Module, reference: nn.Module) -> None:
    """Whole values are those of a model in one process."""
    values = model.state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(values[name].full_tensor(), value, rtol=1e-5, atol=1e-6)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it: all, where it is replicated."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def assert_same(model: nn.Module, reference: nn.Module, what: str) -> None:
    """Values and gradients, parameter by parameter, also whether there is a gradient at all."""
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(local(ours), theirs, msg=lambda text, n=name: f"{what}: {n}: {text}")
        assert (ours.grad is None) == (theirs.grad is None), f"{what}: {name}: {ours.grad} for {theirs.grad}"
        if ours.grad is not None:
            torch.testing.assert_close(
                local(ours.grad), theirs.grad, msg=lambda text, n=name: f"{what}: grad {n}: {text}"
            )


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A replicated model, and a copy of it that one process trains on the data of all ranks."""
    reference = copy.deepcopy(model)
    return shardwise.replicate(model), reference


def counters(model: nn.Module) -> dict[str, int]:
    return unit_of(model).counters()
