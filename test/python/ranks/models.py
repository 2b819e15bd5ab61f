"""Models and data that the rank tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten_with_path

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


class Layer(nn.Module):
    """Two linear layers with tanh between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Block(Layer):
    """Adds to its input what the layers make of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


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


def rounded_backward(
    model: nn.Module,
    loss_of_rank: Callable[[Any, int], torch.Tensor],
    ranks: int,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
) -> None:
    """One process does what ranks do in low precision: the gradients of casts of the model, and their mean in `reduce`.
    None: in the dtypes of the parameters."""
    casts = [copy.deepcopy(model).to(dtype=compute) for _ in range(ranks)]
    for rank, each in enumerate(casts):
        each.zero_grad()
        loss_of_rank(each, rank).backward()
    p: Any
    for p, *parts in zip(model.parameters(), *(each.parameters() for each in casts), strict=True):
        p.grad = sum(part.grad.to(reduce or p.dtype) / ranks for part in parts).to(p.dtype)


def step_all(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """And drops the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def fill(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Gives each parameter this rank's part of the whole values."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        on = parameter.device_mesh
        source = DTensor.from_local(whole[name], on, [Replicate()] * on.ndim, run_check=False)
        with torch.no_grad():
            parameter.copy_(source.redistribute(placements=parameter.placements))


def train_alike(
    models: Sequence[nn.Module],
    reference: nn.Module,
    backward: Callable[[Any, int, int], Any],
    part: tuple[int, int],
    optimizer: Callable[..., torch.optim.Optimizer],
    rtol: float = 1e-5,
) -> None:
    """Each with one part of the data, given as its number and their count, beside one process that has all: whole
    gradients and values are its, and shards are the same in all. `backward` brings the gradients of a step and a
    part."""
    number, parts = part
    optimizers = [optimizer(each.parameters()) for each in (reference, *models)]
    for step in range(3):
        for each in range(parts):
            backward(reference, step, each)
        for model in models:
            backward(model, step, number)
        for name, whole in reference.named_parameters():
            mine, *others = [model.get_parameter(name) for model in models]
            assert (mine.grad is None) == (whole.grad is None), name
            if whole.grad is None:
                continue
            assert isinstance(mine, DTensor) and isinstance(mine.grad, DTensor), name
            whole.grad /= parts
            torch.testing.assert_close(mine.grad.full_tensor(), whole.grad, rtol=rtol, atol=rtol / 100)
            for other in others:
                assert mine._spec == other._spec and mine.grad._spec == other.grad._spec, name
                torch.testing.assert_close(local(mine.grad), local(other.grad), rtol=rtol, atol=rtol / 100)
        step_all(optimizers)
    values = models[0].state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(values[name].full_tensor(), value, rtol=rtol, atol=rtol / 10)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it: all, where it is replicated."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, on each rank."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def mean_square(model: Any, step: int, rank: int) -> torch.Tensor:
    """The loss of a model whose first layer tells what its data is like."""
    x = batch(step, rank, model[0].in_features).to(model[0].bias.dtype)
    return model(x).pow(2).mean()


class Beside:
    """A wrapped model, and a copy of it in one process that has the data of all ranks."""

    def __init__(
        self,
        model: Any,
        wrap: Callable[[Any], Any],
        loss: Callable[[Any, int, int], torch.Tensor] = mean_square,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        plain: Any = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        """`place`: this rank's number among those with data of their own, and how many these are; all unless given."""
        self.plain: Any = copy.deepcopy(model) if plain is None else plain
        wrap(model)
        self.model, self.loss = model, loss
        self.rank, self.ranks = place or (dist.get_rank(), dist.get_world_size())
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        self.optimizers = [make(each.parameters()) for each in (self.model, self.plain)]

    def backward(self, step: int) -> None:
        self.loss(self.model, step, self.rank).backward()
        reference_backward(self.ranks, lambda rank: self.loss(self.plain, step, rank))

    def check(self, what: str) -> None:
        """Values and gradients, also whether there is a gradient at all."""
        for (name, mine), theirs in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            self.compare(name, mine, theirs.detach(), f"{what}: {name}")
            assert (mine.grad is None) == (theirs.grad is None), f"{what}: {name}: {mine.grad} for {theirs.grad}"
            if mine.grad is not None:
                self.compare(name, mine.grad, theirs.grad, f"{what}: the gradient of {name}")

    def compare(self, name: str, mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        assert_close(whole(mine), theirs, what)

    def step(self, what: str = "") -> None:
        """The optimizers' steps, between gradients and values that must be the same."""
        self.check(f"{what} before the optimizer")
        step_all(self.optimizers)
        self.check(f"{what} after the optimizer")

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.backward(step)
            self.step(f"step {step}")


def assert_close(mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, f"{what}: {mine} for {theirs}"
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


def assert_same_tree(mine: Any, theirs: Any) -> None:
    """Names, kinds of tensors, where they lie, and bits."""
    (some, form), (others, wanted_form) = (tree_flatten_with_path(each) for each in (mine, theirs))
    assert form == wanted_form
    for (place, value), (_, wanted) in zip(some, others, strict=True):
        assert type(value) is type(wanted), f"{place}: {type(value)} for {type(wanted)}"
        if isinstance(value, DTensor):
            assert value._spec == wanted._spec, f"{place}: {value._spec} for {wanted._spec}"
        is_tensor = isinstance(value, torch.Tensor)
        assert not is_tensor or value.dtype == wanted.dtype, f"{place}: {value.dtype} for {wanted.dtype}"
        same = torch.equal(local(value), local(wanted)) if is_tensor else value == wanted
        assert same, f"{place}: {value} for {wanted}"


def counters(model: nn.Module) -> dict[str, int]:
    return unit_of(model).counters()
