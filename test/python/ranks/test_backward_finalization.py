"""Backwards that the program ends itself, iterations that it gives up, and gradients of what nobody used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Beside, Branches, batch, mean_square
from pool import on_ranks
from torch import nn

import shardwise

KINDS = ["fully_shard", "replicate"]


def beside(kind: str) -> Beside:
    def wrap(model: nn.Sequential) -> None:
        for module in (model[1], model):
            getattr(shardwise, kind)(module)

    torch.manual_seed(7)
    return Beside(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5, bias=False), nn.Linear(5, 3)), wrap)


def finalized(rank: int, kind: str) -> None:
    both = beside(kind)
    both.model.finalize_backward()  # before the first forward there is nothing to do
    both.model.set_manual_backward_finalization(True)
    for step in range(4):
        for micro in range(3):
            both.model.set_requires_gradient_sync(step == 3)
            both.backward(3 * step + micro)
        assert step == 3 or all(parameter.grad is None for parameter in both.model.parameters())
        both.model.set_requires_gradient_sync(True)
        if step % 2:
            handle = both.model.finalize_backward(async_op=True)
            with pytest.raises(RuntimeError, match="must be waited on before"):
                both.model.finalize_backward()
            handle.wait()
            handle.wait()
        else:
            assert both.model.finalize_backward() is None
        both.step()


def refused(rank: int, kind: str) -> None:
    both = beside(kind)
    both.train([0])
    with pytest.raises(RuntimeError, match="requires manual backward finalization"):
        both.model.finalize_backward()
    both.model.set_manual_backward_finalization(True)
    mean_square(both.model, 1, rank).backward()
    handle = both.model.finalize_backward(async_op=True)
    both.model.reset_iter_state()
    with pytest.raises(RuntimeError, match="was invalidated"):
        handle.wait()
    both.model.set_separate_reduce_scatter_group()
    for wrong, error in ((True, TypeError), (0, ValueError)):
        with pytest.raises(error, match="max_input_buffers must be"):
            both.model.set_reduce_scatter_max_input_buffers(wrong)


class Failed(Exception):
    pass


def fail(*args: object) -> None:
    raise Failed


def fail_in_forward(both: Beside) -> None:
    hook = both.model[2].register_forward_pre_hook(fail)
    try:
        mean_square(both.model, 3, both.rank)
    finally:
        hook.remove()


def fail_in_backward(both: Beside) -> None:
    out = both.model(batch(3, both.rank, 6))
    out.register_hook(fail)
    out.pow(2).mean().backward()


def reset_after_exception(rank: int, kind: str) -> None:
    for failing in (fail_in_forward, fail_in_backward):
        both = beside(kind)
        both.train([0])
        both.model.set_requires_gradient_sync(False)
        mean_square(both.model, 1, rank).backward()
        both.model.set_requires_gradient_sync(True)
        both.model.set_manual_backward_finalization(True)
        mean_square(both.model, 2, rank).backward()
        with pytest.raises(Failed):
            failing(both)
        both.model.reset_iter_state()
        both.model.zero_grad()
        both.model.set_manual_backward_finalization(False)
        both.train(range(4, 7))


def unused(rank: int, kind: str) -> None:
    """Nobody uses the right branch; rank 0 alone uses the left one."""

    def loss(model: Any, step: int, of: int) -> torch.Tensor:
        return model(batch(step, of, 3), ["left"] if of == 0 else []).pow(2).mean()

    def wrap(model: Branches) -> None:
        # A sharded unit is used by all ranks or by none.
        for module in ([model.left] if kind == "replicate" else []) + [model.right, model]:
            getattr(shardwise, kind)(module)

    both = Beside(Branches(), wrap, loss)
    for step in range(4):
        zeros = step < 2
        both.model.set_reduce_scatter_unused_params(zeros)
        both.backward(step)
        for parameter in both.plain.parameters():
            if zeros and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        both.step()


class TestFullyShardFinalize:
    test_several_backwards_are_one_sum = on_ranks(2, finalized, each=KINDS)
    test_wrong_calls_are_errors = on_ranks(2, refused, each=KINDS)
    test_unused_parameters_get_zeros = on_ranks(2, unused, each=KINDS)


class TestFullyShard1DTrainingCompose:
    test_reset_iter_state_after_exception = on_ranks(2, reset_after_exception, each=KINDS)
