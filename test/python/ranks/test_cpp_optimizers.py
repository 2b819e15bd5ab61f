"""The optimizers for C++ programs beside Python's fused ones: the same values to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bound import models

CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 0.02, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.02, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    ("Adam", {"lr": 0.02}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}),
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
]
SIZES = ((3, 5), (1,), (0, 4), (1000,), (2, 3, 4))


def tensors(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=None if value is True else torch.double) for name, value in options.items()}


def parameters(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(sizes, generator=random).to(dtype).requires_grad_() for sizes in SIZES]


def gradients(dtype: torch.dtype, step: int) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    for sizes in SIZES:
        yield torch.randn(sizes, generator=random).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.half, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_are_those_of_python(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype, 1), parameters(dtype, 1)
    later, their_later = parameters(torch.float, 2), parameters(torch.float, 2)
    mine = models().Optimizer(name, ours, tensors(options))
    mine.add_group(later, tensors({**options, "lr": 0.3}))
    groups = [{"params": theirs}, {"params": their_later, "lr": 0.3}]
    their_optimizer: Any = getattr(torch.optim, name)(groups, fused=True, **options)
    for step in range(5):
        # In some steps of Adam a parameter has no gradient; Python's SGD takes no parameter that begins later.
        left_out = step % 3 if name != "SGD" else None
        for kind, pair in ((dtype, (ours, theirs)), (torch.float, (later, their_later))):
            for number, (gradient, one, other) in enumerate(zip(gradients(kind, step), *pair, strict=True)):
                one.grad, other.grad = (None, None) if number == left_out else (gradient.clone(), gradient.clone())
        mine.step()
        their_optimizer.step()
        for one, other in zip(itertools.chain(ours, later), itertools.chain(theirs, their_later), strict=True):
            assert torch.equal(one, other), (step, one, other)
            kept, expected = mine.kept(one), their_optimizer.state[other]
            assert kept.keys() == {key for key, value in expected.items() if value is not None}, step
            for key, value in kept.items():
                assert value.dtype == expected[key].dtype, key
                assert torch.equal(value, expected[key]), (step, key)
