"""set_local_optimizers(): programs that do not know of it train as before, to the bit, in local steps."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine import ours
from form import by_form
from layouts import by_layer
from local_steps import ADAM, FUSED, both_ways, wrapped
from models import batch, local
from parity import Wrapping, assert_same_bits, train
from pool import run_ranks
from test_interop_optimizers import OPTIMIZERS, WIDTHS, InBackward, copy_of, optimizer
from test_local_optimizer import OTHERS, Hooked, Make, advance, assert_same_state, assert_same_values
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training_models import mlp_program

import shardwise

MORE = [
    *OTHERS,
    optimizer(Adam, eps=0.1, maximize=True, fused=True),
    optimizer(AdamW, eps=0.1, amsgrad=True, maximize=True, foreach=False),
    optimizer(RMSprop, eps=0.1, momentum=0.5, foreach=False),
]


def same_training(rank: int, layout: str) -> None:
    every = OPTIMIZERS + MORE
    for make in by_form(every[::2], every) if layout == "fully_shard" else OPTIMIZERS[1::2]:
        program = mlp_program(WIDTHS, optimizer=make, steps=3)
        mine, usual = both_ways(lambda p=program: train(ours(), p, Wrapping(by_layer(layout)), rank), 3)
        assert_same_bits(mine, usual)
        assert type(mine.optimizer) is type(usual.optimizer)
        assert_same_state(mine.optimizer, usual.optimizer)


def everything_around(rank: int) -> None:
    # A learning rate scheduler from before the first step, a scaler that skips one, clipping, hooks, a late group.
    for make in (OPTIMIZERS[0], OPTIMIZERS[3], OPTIMIZERS[4]):

        def program(make: Make = make) -> Hooked:
            model = wrapped()
            extra = nn.Parameter(distribute_tensor(torch.ones(5), next(model.parameters()).device_mesh, [Shard(0)]))
            hooked = Hooked(make, model, extra)
            handles = [
                register_optimizer_step_pre_hook(lambda *_: hooked.look("first")),
                register_optimizer_step_post_hook(lambda *_: hooked.look("last")),
            ]
            for number in range(6):
                hooked.step(number, rank)
            for handle in handles:
                handle.remove()
            return hooked

        # A fused optimizer is stepped when it is to skip, too.
        fused = make(wrapped()).defaults.get("fused")
        mine, usual = both_ways(program, 6 if fused else 5)
        assert_same_values([mine.model, usual.model])
        assert torch.equal(local(mine.extra), local(usual.extra)) and not torch.equal(local(mine.extra), torch.ones(3))
        assert mine.seen == usual.seen and {when for when, *_ in mine.seen} == {"first", "before", "after", "last"}
        assert all(kind is DTensor for _, kinds, *_ in mine.seen for kind in kinds)
        assert mine.scheduler.get_last_lr() == usual.scheduler.get_last_lr()
        assert mine.scaler.get_scale() == usual.scaler.get_scale()
        assert_same_state(mine.optimizer, usual.optimizer)


def closures(rank: int) -> None:
    def program() -> tuple[Any, Optimizer, list[Any]]:
        model = wrapped()
        one = FUSED(model)
        losses = []
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                assert torch.is_grad_enabled() and all(type(p) is DTensor for p in one.param_groups[0]["params"])
                one.zero_grad()
                loss: torch.Tensor = model(batch(step, rank, WIDTHS[0])).pow(2).mean()
                loss.backward()
                return loss

            losses.append(one.step(closure) if step % 2 else one.step(closure=closure))
            assert torch.is_grad_enabled() and all(p._local_tensor.grad is None for p in model.parameters())
        return model, one, losses

    mine, usual = both_ways(program, 4)
    assert_same_values([mine[0], usual[0]])
    assert mine[2] == usual[2]


def errors(rank: int) -> None:
    """In a closure, and in a step that is under way; then the training goes on."""
    for make in (ADAM, OPTIMIZERS[5]):

        def program(make: Make = make) -> tuple[Any, Optimizer]:
            model = wrapped()
            one = make(model)
            for step in range(4):
                advance(model, one, step, rank)
                before = [(p, list(entry.items())) for p, entry in one.state.items()]
                held = list(model.parameters())
                with pytest.raises(ZeroDivisionError):
                    one.step(lambda: 1 / 0)
                last = one.state[held[-1]]
                taken = last.pop("exp_avg_sq")
                with pytest.raises(KeyError, match="exp_avg_sq"):
                    one.step()
                last["exp_avg_sq"] = taken
                assert all(map(lambda a, b: a is b, one.param_groups[0]["params"], held))
                assert all(p._local_tensor.grad is None and p.grad is not None for p in held)
                for (p, items), (q, entry) in zip(before, one.state.items(), strict=True):
                    assert p is q and [(name, id(value)) for name, value in items] == [
                        (name, id(value)) for name, value in entry.items()
                    ]
            return model, one

        mine, usual = both_ways(program, 4)
        assert_same_values([mine[0], usual[0]])
        assert_same_state(mine[1], usual[1])


def errors_under_way(rank: int) -> None:
    """A step that raises after it has made state and written to parameters: neither is lost."""

    def program() -> tuple[Any, Optimizer]:
        model = wrapped()
        one = optimizer(Adam, eps=0.1, foreach=False)(model)
        for step in range(2):
            advance(model, one, step, rank)
        first, *_, last = model.parameters()
        del one.state[first]
        one.state[last]["exp_avg"] = distribute_tensor(torch.ones(4, 9), last.device_mesh, [Shard(0)])
        version, value = first._version, local(first).clone()
        with pytest.raises(RuntimeError):
            one.step()
        assert first._version > version and not torch.equal(local(first), value)
        assert all(type(p) is DTensor and p._local_tensor.grad is None for p in one.param_groups[0]["params"])
        one.state[last]["exp_avg"] = torch.zeros_like(last)
        for step in range(2, 4):
            advance(model, one, step, rank)
        one.state[first] = one.state.pop(first)
        return model, one

    mine, usual = both_ways(program, 4)
    assert_same_values([mine[0], usual[0]])
    assert_same_state(mine[1], usual[1])


def looked_at(rank: int) -> None:
    """A program holds the state across steps, changes it, replaces it and loads it."""

    def program() -> tuple[Any, Optimizer]:
        model = wrapped()
        one = ADAM(model)
        advance(model, one, 0, rank)
        state = one.state
        entries = {p: entry["exp_avg"] for p, entry in state.items()}
        advance(model, one, 1, rank)
        assert one.state is state and all(one.state[p]["exp_avg"] is value for p, value in entries.items())
        for entry in state.values():
            entry["exp_avg"].mul_(0.5)
            entry["exp_avg_sq"] = entry["exp_avg_sq"] * 2
        freed = weakref.ref(next(iter(state.values()))["exp_avg_sq"]._local_tensor)
        advance(model, one, 2, rank)
        for entry in state.values():
            entry["exp_avg_sq"] = entry["exp_avg_sq"].clone()
        assert freed() is None, "nothing keeps what the program dropped"
        advance(model, one, 3, rank)
        one.load_state_dict(copy.deepcopy(one.state_dict()))
        advance(model, one, 4, rank)
        # Without the state of one parameter it begins anew.
        del one.state[next(model.parameters())]
        advance(model, one, 5, rank)
        return model, one

    mine, usual = both_ways(program, 6)
    assert_same_values([mine[0], usual[0]])
    assert {id(p) for p in mine[1].state} == {id(p) for p in mine[0].parameters()}
    for p, q in zip(mine[0].parameters(), usual[0].parameters(), strict=True):
        for name, value in mine[1].state[p].items():
            assert torch.equal(local(value), local(usual[1].state[q][name])), name


def checkpoints(rank: int, layout: str) -> None:
    unbroken: Any = wrapped(layout)
    reference = ADAM(unbroken)
    for step in range(6):
        advance(unbroken, reference, step, rank)
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        for first_is_local in (True, False):
            model: Any = wrapped(layout)
            one, other = ADAM(model), ADAM(again := wrapped(layout))
            shardwise.set_local_optimizers(first_is_local)
            for step in range(3):
                advance(model, one, step, rank)
            state = get_optimizer_state_dict(model, one, options=options)
            again.load_state_dict(copy_of(model.state_dict()))
            shardwise.set_local_optimizers(not first_is_local)
            set_optimizer_state_dict(again, other, optim_state_dict=copy_of(state), options=options)
            for step in range(3, 6):
                advance(again, other, step, rank)
            shardwise.set_local_optimizers(False)
            assert_same_values([again, unbroken])
            assert_same_state(other, reference)


def in_backward(rank: int, layout: str) -> None:
    program: Any = replace(mlp_program(WIDTHS, steps=4), optimizer=InBackward)
    count = 4 * len(list(wrapped(layout).parameters()))
    mine, usual = both_ways(lambda: train(ours(), program, Wrapping(by_layer(layout)), rank), count)
    assert_same_bits(mine, usual)


class TestAutomaticSteps:
    @pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
    def test_train_as_the_usual_ones(self, layout: str) -> None:
        run_ranks(2, same_training, layout)

    def test_everything_around_them(self) -> None:
        run_ranks(2, everything_around)

    def test_closures(self) -> None:
        run_ranks(2, closures)

    def test_errors(self) -> None:
        run_ranks(2, errors)
        run_ranks(2, errors_under_way)

    def test_state_is_looked_at(self) -> None:
        run_ranks(2, looked_at)

    @pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
    def test_checkpoints(self, layout: str) -> None:
        run_ranks(2, checkpoints, layout)

    @pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
    def test_in_backward(self, layout: str) -> None:
        run_ranks(2, in_backward, layout)
