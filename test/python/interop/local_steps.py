"""Programs in local steps that they do not know of, and without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine import Engine, ours
from layouts import by_layer
from models import mlp
from test_interop_optimizers import WIDTHS, optimizer
from torch.optim import Adam, AdamW, Optimizer

import shardwise
from shardwise import _automatic_steps

ADAM, FUSED = optimizer(Adam, eps=0.1), optimizer(AdamW, eps=0.1, fused=True)


@contextmanager
def counted() -> Iterator[list[Optimizer]]:
    """The optimizers of the steps that were made locally."""
    steps: list[Optimizer] = []
    real = _automatic_steps.step_locally

    def count(one: Optimizer, *others: Any, **options: Any) -> None:
        real(one, *others, **options)
        steps.append(one)

    _automatic_steps.step_locally = count  # type: ignore[assignment]
    try:
        yield steps
    finally:
        _automatic_steps.step_locally = real


@contextmanager
def automatic() -> Iterator[list[Optimizer]]:
    shardwise.set_local_optimizers(True)
    try:
        with counted() as steps:
            yield steps
    finally:
        shardwise.set_local_optimizers(False)


def both_ways(program: Callable[[], Any], local_steps: int) -> tuple[Any, Any]:
    """What a program returns in local steps, of which there must be so many, and without them."""
    with automatic() as steps:
        mine = program()
    assert len(steps) == local_steps, f"{len(steps)} local steps"
    with counted() as steps:
        usual = program()
    assert steps == []
    return mine, usual


def wrapped(layout: str = "fully_shard", engine: Engine | None = None) -> Any:
    model = mlp(*WIDTHS)
    by_layer(layout)(engine or ours(), model)
    return model
