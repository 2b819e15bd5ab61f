"""The rows of replicate_training about checkpoints, shared parameters, microbatches and methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from engine import TORCH, Engine, ours
from form import by_form
from language import CHECKPOINTS, GROUPINGS, checkpoint_blocks, text_program, vision_program, wrap_blocks, wrap_groups
from microbatches import (
    MODES,
    accumulation_program,
    begin_microbatch,
    is_last,
    pipeline_program,
    reductions,
    set_flags,
    wrap_mlps,
)
from parity import Parity, Wrap, Wrapping, assert_same_bits
from pool import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor


def checkpointed_groups(rank: int) -> None:
    for number, grouping in enumerate(GROUPINGS):
        tied = grouping == "tied"

        def wrapping(how: str | None, grouping: str = grouping) -> Wrap:
            def wrap(engine: Engine, model: Any) -> None:
                checkpoint_blocks(model, how)
                wrap_groups(model, grouping, engine.replicate)

            return wrap

        parity = Parity(text_program(tied=tied))
        theirs = parity.run(TORCH, wrapping("composable"))
        for how in by_form([CHECKPOINTS[number % len(CHECKPOINTS)]], CHECKPOINTS):
            mine = parity.run(ours(), wrapping(how))
            assert_same_bits(mine, theirs)
            assert_is_tied(mine.model, tied)


def assert_is_tied(model: Any, tied: bool) -> None:
    assert (model.tokens.weight is model.head.weight) == tied


def shared(rank: int) -> None:
    parity = Parity(text_program(tied=True))
    for how in (None, "utils"):

        def wrap(engine: Engine, model: Any, how: str | None = how) -> None:
            checkpoint_blocks(model, how)
            wrap_blocks(model, engine.replicate)

        mine = parity.both(wrap, exact=dist.get_world_size() == 2)
        assert_is_tied(mine.model, True)
        assert "head.weight" not in dict(mine.model.named_parameters())
        assert "head.weight" in mine.model.state_dict()


def accumulated(rank: int) -> None:
    parity = Parity(accumulation_program())
    for mode in MODES:
        wrapping = Wrapping(
            lambda engine, model: wrap_mlps(model, engine.replicate),
            before=lambda model, part, mode=mode: set_flags(model, part, mode),
        )
        traces = [parity.run(engine, wrapping, counted=True) for engine in (TORCH, ours())]
        for trace in traces:
            # torch's own row has these numbers, but looks at them only on a mesh of two dimensions.
            for step in trace.steps:
                assert step.counts == {"allreduce_": reductions(mode)}, f"{mode}: {step.counts}"
        if dist.get_world_size() == 2:
            assert_same_bits(traces[1], traces[0])


def microbatched(rank: int) -> None:
    def out_of_sight(model: Any, part: int) -> None:
        # What is not averaged yet is no gradient of a parameter; full copies may have one.
        for p in model.parameters():
            if isinstance(p, DTensor):
                assert (p.grad is not None and bool(p.grad.to_local().any())) == is_last(part)

    parity = Parity(pipeline_program())
    theirs = None
    for unshard_first in (False, True):
        for keep_full in by_form((unshard_first,), (False, True)):

            def before(model: Any, part: int, first: bool = unshard_first, keep: bool = keep_full) -> None:
                begin_microbatch(model, part, first, keep)

            def wrap(engine: Engine, model: Any) -> None:
                wrap_blocks(model, engine.replicate)

            wrapping = Wrapping(wrap, before=before, after=out_of_sight)
            theirs = theirs or parity.run(TORCH, wrapping)
            mine = parity.run(ours(), wrapping, counted=True)
            assert_same_bits(mine, theirs)
            assert [step.counts for step in mine.steps] == [{"allreduce_": 4}] * 4


def another_method(rank: int) -> None:
    def wrap(engine: Engine, model: Any) -> None:
        for block in model.blocks:
            engine.replicate(block)
        engine.replicate(model)
        engine.register_fsdp_forward_method(model, "forward_features")

    Parity(vision_program()).both(wrap, exact=dist.get_world_size() == 2)
    # Of a module that is no unit nothing is asked; one that is must have the method.
    ours().register_fsdp_forward_method(nn.Linear(2, 2), "no_such_method")
    with pytest.raises(ValueError, match="does not have a method"):
        ours().register_fsdp_forward_method(ours().replicate(nn.Linear(2, 2)), "no_such_method")


class TestReplicateTrainingCompose:
    def test_train_parity_with_activation_checkpointing(self) -> None:
        run_ranks(2, checkpointed_groups, timeout=300)


class TestReplicateSharedParams:
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_train_parity_with_shared_params(self, world_size: int) -> None:
        run_ranks(world_size, shared)


class TestReplicateGradientAccumulation:
    @pytest.mark.parametrize("world_size", by_form([2], [2, 3]))
    def test_gradient_accumulation(self, world_size: int) -> None:
        run_ranks(world_size, accumulated)

    def test_1f1b_microbatching(self) -> None:
        run_ranks(2, microbatched)


class TestReplicateCustomForwardMethod:
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_register_fsdp_forward_method(self, world_size: int) -> None:
        run_ranks(world_size, another_method)
