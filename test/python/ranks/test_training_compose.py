"""The rows of fully_shard_training and replicate_training about checkpoints and shared parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import TORCH, Engine, ours
from form import by_form
from language import CHECKPOINTS, GROUPINGS, checkpoint_blocks, text_loss, text_program, wrap_groups
from models import local
from parity import Parity, Program, Wrap, assert_same_bits
from pool import on_ranks, run_ranks
from training_models import SETTINGS


def by_groups(function: str, how: str | None, grouping: str = "block", **options: Any) -> Wrap:
    def wrap(engine: Engine, model: Any) -> None:
        checkpoint_blocks(model, how)
        wrap_groups(model, grouping, lambda part: getattr(engine, function)(part, **options))

    return wrap


def checkpointed_groups(rank: int, function: str) -> None:
    for number, grouping in enumerate(GROUPINGS):
        parity = Parity(text_program(tied=grouping == "tied"))
        theirs = parity.run(TORCH, by_groups(function, "composable", grouping), counted=True)
        mine = parity.run(ours(), by_groups(function, "composable", grouping), counted=True)
        # In pairs: what backward does not read is not gathered for it.
        assert [step.counts for step in mine.steps] == [step.counts for step in theirs.steps]
        others = [(how, options) for how in CHECKPOINTS for options in SETTINGS[function]]
        for how, options in by_form(others[2 + number :: 5], others):
            mine = parity.run(ours(), by_groups(function, how, grouping, **options))
            assert_same_bits(mine, theirs)
            assert (mine.model.tokens.weight is mine.model.head.weight) == (grouping == "tied")


def two_forwards_one_backward(rank: int) -> None:
    def loss(model: Any, number: int, data_rank: int) -> torch.Tensor:
        first = text_loss(model, 2 * number, data_rank)
        return first + text_loss(model, 2 * number + 1, data_rank) * first

    def wrapping(how: str | None, **options: Any) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            checkpoint_blocks(model, how)
            for block in model.blocks:
                inner = getattr(block, "_checkpoint_wrapped_module", block)
                for part in (inner.attention, [inner.up, inner.down], inner):
                    engine.fully_shard(part, **options)
            engine.fully_shard(model, **options)

        return wrap

    program = text_program(depth=2)
    parity = Parity(Program(program.make, loss, steps=3))
    assert all(gradient is not None for gradient in parity.expected[0].gradients.values())
    theirs = parity.run(TORCH, wrapping("composable"))
    for how, options in zip(CHECKPOINTS, SETTINGS["fully_shard"], strict=True):
        assert_same_bits(parity.run(ours(), wrapping(how, **options)), theirs)


def shared(rank: int, function: str) -> None:
    parity = Parity(text_program(tied=True))
    theirs = parity.run(TORCH, by_groups(function, None))
    for number, options in enumerate(SETTINGS[function]):
        mine = parity.run(ours(), by_groups(function, (None, "utils")[number % 2], **options))
        assert_same_bits(mine, theirs)
        assert mine.model.tokens.weight is mine.model.head.weight
        assert "head.weight" not in dict(mine.model.named_parameters())
        assert "head.weight" in mine.model.state_dict()


def uneven_table(rank: int) -> int:
    parity = Parity(text_program(vocabulary=9, tied=True))
    mine = parity.both(by_groups("fully_shard", None, "tied"))
    before = parity.pieces.of(parity.program.make().tokens.weight.detach(), mine.model.tokens.weight)
    after = local(mine.model.tokens.weight)
    assert (after != before).any(1).all(), "a row that did not move"
    assert torch.equal(local(mine.model.head.weight), after)
    return after.shape[0]


def shared_across_units(rank: int) -> None:
    engine = ours()

    def forward_of_tied(wrap: Any) -> None:
        model = text_program(tied=True).make()
        wrap(model)
        text_loss(model, 0, rank)

    def apart(model: Any) -> None:
        for part in (model.tokens, model.head, model):
            engine.fully_shard(part)

    def table_alone(model: Any) -> None:
        for part in (model.tokens, model):
            engine.fully_shard(part)

    for wrap in (apart, table_alone):
        if engine.name == "torch":
            # torch 2.11 notices nothing, and trains two parameters; later ones raise this error.
            forward_of_tied(wrap)
            continue
        model = text_program(tied=True).make()
        with pytest.warns(UserWarning, match="already managed by another") as warned:
            wrap(model)
        assert [each.filename for each in warned] == [__file__]
        for _ in range(2):
            with pytest.raises(ValueError, match="already managed by another") as error:
                text_loss(model, 0, rank)
            assert "'tokens.weight'" in str(error.value) and "'head.weight'" in str(error.value)
    # In one call, or left to the module around both, they are one parameter.
    for wrap in (lambda model: wrap_groups(model, "tied", engine.fully_shard), engine.fully_shard):
        forward_of_tied(wrap)


def layer_by_layer(rank: int) -> None:
    # Also a second model of the same names and shapes beside it, and one that is not tied.
    def wrap_all(engine: Engine, model: Any) -> None:
        engine.fully_shard([model.tokens, model.head])
        for block in model.blocks:
            for layer in (block.attention.mix, block.attention.out, block.norm_1, block.up, block):
                engine.fully_shard(layer)
        engine.fully_shard(model)

    for tied in (True, False):
        program = text_program(tied=tied, steps=4)

        def wrap(engine: Engine, model: Any, program: Program = program) -> None:
            wrap_all(engine, program.make())
            wrap_all(engine, model)

        Parity(program).both(wrap)


class TestFullyShard1DTrainingCompose:
    test_train_parity_with_activation_checkpointing = on_ranks(2, checkpointed_groups, "fully_shard", timeout=300)
    test_double_forward_with_nested_fsdp_and_checkpoint = on_ranks(2, two_forwards_one_backward)


class TestReplicateTrainingCompose:
    test_train_parity_with_activation_checkpointing = on_ranks(2, checkpointed_groups, "replicate", timeout=300)


class TestFullyShardSharedParams:
    test_train_parity_with_shared_params = on_ranks(2, shared, "fully_shard")

    def test_train_shared_params_uneven_shard(self) -> None:
        assert run_ranks(2, uneven_table) == [5, 4]

    test_shared_params_separate_fsdp_groups_error = on_ranks(2, shared_across_units)
    test_layer_by_layer_shard_no_false_positive = on_ranks(2, layer_by_layer)


class TestReplicateSharedParams:
    test_train_parity_with_shared_params = on_ranks(2, shared, "replicate")
