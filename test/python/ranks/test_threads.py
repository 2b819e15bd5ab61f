"""Several threads and one model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import batch, whole
from pool import on_ranks
from torch import Tensor, nn

import shardwise

WIDTH = 6
REFUSED = "a model that thread"
KINDS = ("fully_shard", "replicate")


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.inside: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is not None:
            self.inside()
        return torch.tanh(super().forward(x))


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Layer(), Layer(), Layer())


def wrapped(kind: str) -> nn.Sequential:
    ours = model()
    for module in (*ours, ours):
        getattr(shardwise, kind)(module)
    return ours


def error_in_thread(act: Callable[[], object]) -> str:
    """What another thread's call raises."""
    with ThreadPoolExecutor(1) as pool:
        return str(pool.submit(act).exception() or "")


def in_forward(rank: int, kind: str) -> None:
    ours, reference = wrapped(kind), model()
    x = batch(0, rank, WIDTH)
    errors: list[str] = []
    with torch.no_grad():
        expected = reference(x)

        def use_from_another() -> None:
            ours[1].inside = None
            errors.append(error_in_thread(lambda: ours(x)))

        ours[1].inside = use_from_another
        for _ in range(2):
            torch.testing.assert_close(ours(x), expected)
        (error,) = errors
        assert REFUSED in error

        # A forward that failed is over.
        def fail() -> None:
            raise ValueError("on purpose")

        ours[1].inside = fail
        with pytest.raises(ValueError, match="on purpose"):
            ours(x)
        ours[1].inside = None

        def again() -> None:
            with torch.no_grad():
                torch.testing.assert_close(ours(x), expected)

        assert error_in_thread(again) == ""


def in_backward(rank: int, kind: str) -> None:
    ours, reference, neighbour = wrapped(kind), model(), wrapped(kind)
    for step in range(2):
        x = batch(step, rank, WIDTH)
        # Sums of another model would go between those of this one, anywhere.
        losses = [each(x).pow(2).sum() for each in (ours, neighbour)]
        errors: list[str] = []

        def use_from_another(
            gradient: Tensor, x: Tensor = x, losses: list[Tensor] = losses, errors: list[str] = errors
        ) -> Tensor:
            errors += [error_in_thread(act) for act in (lambda: ours(x), *(loss.backward for loss in losses))]
            return gradient

        hidden = ours[0](x)
        hidden.register_hook(use_from_another)
        ours[2](ours[1](hidden)).pow(2).sum().backward()
        assert len(errors) == 3 and all(REFUSED in error for error in errors), errors
        for other in range(2):
            (reference(batch(step, other, WIDTH)).pow(2).sum() / 2).backward()
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad)
        ours.zero_grad()
        reference.zero_grad()


class TestThreads:
    test_one_at_a_time_uses_a_model = on_ranks(2, in_forward, each=KINDS)
    test_none_uses_a_model_while_another_runs_its_backward = on_ranks(2, in_backward, each=KINDS)
