"""Several threads and one model."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest
import torch
from models import batch
from pool import run_ranks
from torch import Tensor, nn

import shardwise

WIDTH = 6
REFUSED = "a model that thread"


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
    found = []

    def run() -> None:
        try:
            act()
        except Exception as error:
            found.append(str(error))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return "".join(found)


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


@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_one_thread_at_a_time_uses_a_model(kind):
    run_ranks(2, in_forward, kind)
