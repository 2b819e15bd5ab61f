"""The rows of fully_shard_training about lists of modules of which a forward runs only some: a loss in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from engine import TORCH, Engine, ours
from models import batch, train_alike
from parity import nothing
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

CHUNKS = 3
#: Before that, torch's engine takes a list for used when its last module has run.
TORCH_RUNS_PARTS = torch.__version__ >= "2.15"


class Headed(nn.Module):
    """Its forward leaves out the head, which is in one list with the norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9))
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(9, 5)
        #: The dtypes that norm and head were given.
        self.given: list[tuple[str, torch.dtype]] = []
        for name in ("norm", "head"):
            self.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: self.given.append((name, args[0].dtype))
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


Step = Callable[[Any, torch.Tensor], None]


def in_one_backward(model: Any, x: torch.Tensor) -> None:
    hidden = model(x)
    sum(model.head(chunk).float().pow(2).sum() for chunk in hidden.chunk(CHUNKS)).backward()


def in_chunks(model: Any, x: torch.Tensor) -> None:
    """A backward for each chunk, and one for the rest of the model."""
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    for chunk in leaf.chunk(CHUNKS):
        model.head(chunk).float().pow(2).sum().backward()
    hidden.backward(leaf.grad)


def twice_without_head(model: Any, x: torch.Tensor) -> None:
    """Two forwards that leave out the head, and one backward for both."""
    first, second = x.chunk(2)
    (model(first).pow(2).sum() + model(second).sin().sum()).backward()


def wrap(engine: Engine, model: Headed, **options: Any) -> None:
    for layer in (model.body[0], model.body[2], [model.norm, model.head], model):
        engine.fully_shard(layer, **options)


def train(rank: int, step: Step, before: Callable[[Any, int, int], None], microbatches: int = 1) -> Any:
    """Ours beside plain PyTorch, and torch's engine where it can. `before` is called with the step and microbatch."""
    engines = [ours(), *([TORCH] if TORCH_RUNS_PARTS else [])]
    models: list[Any] = [Headed() for _ in engines]
    for engine, model in zip(engines, models, strict=True):
        wrap(engine, model)

    def backward(model: Any, number: int, part: int) -> None:
        for micro in range(microbatches):
            if model in models:
                before(model, number, micro)
            step(model, batch(number * microbatches + micro, part, 6))

    adam = partial(torch.optim.AdamW, lr=0.02)
    train_alike(models, Headed(), backward, (rank, 2), adam, rtol=1e-4)
    return models[0]


def then_standalone(rank: int) -> None:
    for step in (in_one_backward, in_chunks):
        train(rank, step, nothing)


def accumulated_in_chunks(rank: int) -> None:
    def last_synchronizes(model: Any, number: int, micro: int) -> None:
        model.set_requires_gradient_sync(micro == 2)

    train(rank, in_one_backward, last_synchronizes, microbatches=3)
    train(rank, in_chunks, last_synchronizes, microbatches=3)


def toggled(rank: int) -> None:
    def toggle(model: Any, number: int, micro: int) -> None:
        model.set_reshard_after_forward(number % 2 == 0)

    for step in (in_one_backward, in_chunks):
        model = train(rank, step, toggle)
        # Only the norm ran: the list's parameters are as the last setting has them.
        for reshards in (True, False):
            model.set_reshard_after_forward(reshards)
            model(batch(0, rank, 6))
            assert isinstance(model.head.weight, DTensor) == reshards
            model.head.reshard()
            assert isinstance(model.head.weight, DTensor)


def cast(rank: int) -> None:
    """Norm and head are each given what the policy says, also alone and several times."""
    for casts in (True, False):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=casts)
        model = Headed()
        engine = ours()
        engine.fully_shard(model.body, mp_policy=MixedPrecisionPolicy(output_dtype=None if casts else torch.bfloat16))
        engine.fully_shard([model.norm, model.head], mp_policy=policy)
        engine.fully_shard(model)
        for number in range(3):
            model.given.clear()
            if casts:
                in_one_backward(model, batch(number, rank, 6))
                assert model.given == [("norm", torch.bfloat16), *[("head", torch.bfloat16)] * CHUNKS]
                continue
            with torch.no_grad():
                hidden = model(batch(number, rank, 6))
                assert hidden.dtype == torch.float32, "output_dtype is each module's own"
                model.head(hidden.bfloat16())
            assert model.given == [("norm", torch.bfloat16), ("head", torch.bfloat16)]


def twice(rank: int) -> None:
    train(rank, twice_without_head, nothing)


class TestFullyShard1DTrainingCompose:
    test_double_partial_forward_then_backward = on_ranks(2, twice)
    test_partial_group_forward_then_standalone = on_ranks(2, then_standalone)
    test_partial_group_forward_grad_accum_chunked = on_ranks(2, accumulated_in_chunks)
    test_partial_group_reshard_toggle = on_ranks(2, toggled)
    test_grouped_module_cast_forward_inputs = on_ranks(2, cast)
