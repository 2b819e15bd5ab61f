"""Backwards that the program ends itself, iterations that it gives up, and gradients of what nobody used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from models import batch
from pool import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise

KINDS = ["fully_shard", "replicate"]
Loss = Callable[[nn.Module, int, int], torch.Tensor]


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(batch(step, rank, 6)).pow(2).mean()


class Beside:
    """A wrapped model beside a plain one that sees the data of all ranks."""

    def __init__(
        self, rank: int, kind: str, model: nn.Module, loss: Loss = loss_of, inner: Sequence[int] = (1,)
    ) -> None:
        self.rank, self.loss, self.plain = rank, loss, copy.deepcopy(model)
        self.world = torch.distributed.get_world_size()
        wrap = getattr(shardwise, kind)
        for number in inner:
            wrap(model[number])
        self.model = wrap(model)
        self.optimizers = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in (self.model, self.plain)]

    def backward(self, step: int) -> None:
        self.loss(self.model, step, self.rank).backward()
        for rank in range(self.world):
            (self.loss(self.plain, step, rank) / self.world).backward()

    def step(self) -> None:
        for mine, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                assert isinstance(mine.grad, DTensor)
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-5, atol=1e-6)


def layers() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5, bias=False), nn.Linear(5, 3))


def finalized(rank: int, kind: str) -> None:
    both = Beside(rank, kind, layers())
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
    both = Beside(rank, kind, layers())
    both.backward(0)
    both.step()
    with pytest.raises(RuntimeError, match="requires manual backward finalization"):
        both.model.finalize_backward()
    for call in ("finalize_backward", "reset_iter_state"):
        with pytest.raises(RuntimeError, match=f"{call} must be called on the root"):
            getattr(both.model[1], call)()
    with pytest.raises(RuntimeError, match="must be called on the root"):
        both.model[1].set_manual_backward_finalization(True)
    both.model.set_manual_backward_finalization(True)
    loss_of(both.model, 1, rank).backward()
    with pytest.raises(RuntimeError, match="cannot change mode after backward starts"):
        both.model.set_manual_backward_finalization(False)
    handle = both.model.finalize_backward(async_op=True)
    both.model.reset_iter_state()
    with pytest.raises(RuntimeError, match="was invalidated"):
        handle.wait()
    both.model.zero_grad()
    both.model.set_manual_backward_finalization(False)
    for step in range(2, 5):
        both.backward(step)
        both.step()
    both.model.set_separate_reduce_scatter_group()
    for wrong, error in ((True, TypeError), (0, ValueError)):
        with pytest.raises(error, match="max_input_buffers must be"):
            both.model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(NotImplementedError, match="set_symm_mem_for_comm"):
        both.model.set_symm_mem_for_comm()


class Failed(Exception):
    pass


def fail(*args: object) -> None:
    raise Failed


def fail_in_forward(both: Beside) -> None:
    hook = both.model[2].register_forward_pre_hook(fail)
    try:
        loss_of(both.model, 3, both.rank)
    finally:
        hook.remove()


def fail_in_backward(both: Beside) -> None:
    out = both.model(batch(3, both.rank, 6))
    out.register_hook(fail)
    out.pow(2).mean().backward()


def reset_after_exception(rank: int, kind: str) -> None:
    for failing in (fail_in_forward, fail_in_backward):
        both = Beside(rank, kind, layers())
        both.backward(0)
        both.step()
        both.model.set_requires_gradient_sync(False)
        loss_of(both.model, 1, rank).backward()
        both.model.set_requires_gradient_sync(True)
        both.model.set_manual_backward_finalization(True)
        loss_of(both.model, 2, rank).backward()
        with pytest.raises(Failed):
            failing(both)
        both.model.reset_iter_state()
        both.model.zero_grad()
        both.model.set_manual_backward_finalization(False)
        for step in range(4, 7):
            both.backward(step)
            both.step()


class Branches(nn.Sequential):
    """Nobody uses the third part; the second is used by rank 0 alone."""

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self[0](x)
        return self[1](x) if rank == 0 else x


def unused(rank: int, kind: str) -> None:
    torch.manual_seed(7)
    model = Branches(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    # A sharded unit is used by all ranks or by none.
    inner = (2,) if kind == "fully_shard" else (1, 2)
    both = Beside(rank, kind, model, lambda model, step, of: model(batch(step, of, 6), of).pow(2).mean(), inner)
    for step in range(6):
        zeros = step < 3
        both.model.set_reduce_scatter_unused_params(zeros)
        both.backward(step)
        for parameter in both.plain.parameters():
            if zeros and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        both.step()


class TestFullyShardFinalize:
    @pytest.mark.parametrize("kind", KINDS)
    def test_several_backwards_are_one_sum(self, kind: str) -> None:
        run_ranks(2, finalized, kind)

    @pytest.mark.parametrize("kind", KINDS)
    def test_wrong_calls_are_errors(self, kind: str) -> None:
        run_ranks(2, refused, kind)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("world", [1, 3])
    def test_unused_parameters_get_zeros(self, world: int, kind: str) -> None:
        run_ranks(world, unused, kind)


class TestFullyShard1DTrainingCompose:
    @pytest.mark.parametrize("kind", KINDS)
    def test_reset_iter_state_after_exception(self, kind: str) -> None:
        run_ranks(2, reset_after_exception, kind)
