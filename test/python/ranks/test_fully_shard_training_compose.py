"""The rows of fully_shard_training about checkpoints and shared parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import TORCH, Engine, ours
from form import by_form
from language import CHECKPOINTS, GROUPINGS, checkpoint_blocks, text_loss, text_program, wrap_blocks, wrap_groups
from models import local
from parity import Parity, Program, Wrap, assert_same_bits
from pool import run_ranks


def checkpointed_groups(rank: int) -> None:
    for grouping in GROUPINGS:

        def wrapping(how: str | None, reshard: bool, grouping: str = grouping) -> Wrap:
            def wrap(engine: Engine, model: Any) -> None:
                checkpoint_blocks(model, how)
                wrap_groups(model, grouping, lambda part: engine.fully_shard(part, reshard_after_forward=reshard))

            return wrap

        parity = Parity(text_program(tied=grouping == "tied"))
        theirs = parity.run(TORCH, wrapping("composable", True), counted=True)
        for how, reshard in (("composable", True), ("composable", False), ("utils", True), ("wrapper", False)):
            counted = (how, reshard) == ("composable", True)
            mine = parity.run(ours(), wrapping(how, reshard), counted)
            assert_same_bits(mine, theirs)
            # In pairs: what backward does not read is not gathered for it.
            if counted:
                assert [step.counts for step in mine.steps] == [step.counts for step in theirs.steps]
            assert (mine.model.tokens.weight is mine.model.head.weight) == (grouping == "tied")


def two_forwards_one_backward(rank: int) -> None:
    def loss(model: Any, number: int, data_rank: int) -> torch.Tensor:
        first = text_loss(model, 2 * number, data_rank)
        return first + text_loss(model, 2 * number + 1, data_rank) * first

    def wrapping(how: str | None, reshard: bool | None) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            checkpoint_blocks(model, how)
            for block in model.blocks:
                inner = getattr(block, "_checkpoint_wrapped_module", block)
                engine.fully_shard(inner.attention, reshard_after_forward=reshard)
                engine.fully_shard([inner.up, inner.down], reshard_after_forward=reshard)
                engine.fully_shard(inner, reshard_after_forward=reshard)
            engine.fully_shard(model, reshard_after_forward=reshard)

        return wrap

    program = text_program(depth=2)
    parity = Parity(Program(program.make, loss, steps=4))
    assert all(gradient is not None for gradient in parity.expected[0].gradients.values())
    theirs = parity.run(TORCH, wrapping("composable", None))
    for how in CHECKPOINTS:
        for reshard in (True, False, None):
            assert_same_bits(parity.run(ours(), wrapping(how, reshard)), theirs)


def shared(rank: int) -> None:
    parity = Parity(text_program(tied=True, steps=by_form(3, 10) if dist.get_world_size() == 2 else 3))
    is_exact = dist.get_world_size() == 2

    def wrapping(how: str | None, reshard: Any) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            checkpoint_blocks(model, how)
            wrap_blocks(model, lambda part: engine.fully_shard(part, reshard_after_forward=reshard))

        return wrap

    theirs = parity.run(TORCH, wrapping(None, None))
    for how in (None, "utils"):
        for reshard in (True, False, None) if is_exact else (2,):
            mine = parity.run(ours(), wrapping(how, reshard))
            if is_exact:
                assert_same_bits(mine, theirs)
            assert mine.model.tokens.weight is mine.model.head.weight
            assert "head.weight" not in dict(mine.model.named_parameters())
            assert "head.weight" in mine.model.state_dict()


def uneven_table(rank: int) -> int:
    world = dist.get_world_size()

    def wrap(engine: Engine, model: Any) -> None:
        wrap_groups(model, "tied", engine.fully_shard)

    parity = Parity(text_program(vocabulary=4 * world + 1, tied=True))
    mine = parity.both(wrap, exact=world == 2)
    before = parity.pieces.of(parity.program.make().tokens.weight.detach(), mine.model.tokens.weight)
    after = local(mine.model.tokens.weight)
    assert (after != before).any(1).all(), "a row that did not move"
    assert torch.equal(local(mine.model.head.weight), after)
    whole = mine.model.head.weight.full_tensor()
    torch.testing.assert_close(whole.cpu(), parity.expected[-1].values["tokens.weight"])
    rows: int = after.shape[0]
    return rows


def shared_across_units(rank: int) -> None:
    engine = ours()

    def forward_of_tied(wrap: Any) -> None:
        model = text_program(tied=True).make()
        wrap(model)
        text_loss(model, 0, rank)

    def apart(model: Any) -> None:
        engine.fully_shard(model.tokens)
        engine.fully_shard(model.head)
        engine.fully_shard(model)

    def table_alone(model: Any) -> None:
        engine.fully_shard(model.tokens)
        engine.fully_shard(model)

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
    def test_train_parity_with_activation_checkpointing(self) -> None:
        run_ranks(2, checkpointed_groups, timeout=300)

    def test_double_forward_with_nested_fsdp_and_checkpoint(self) -> None:
        run_ranks(2, two_forwards_one_backward)


class TestFullyShardSharedParams:
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_train_parity_with_shared_params(self, world_size: int) -> None:
        run_ranks(world_size, shared)

    @pytest.mark.parametrize(("world_size", "rows"), [(2, [5, 4]), (4, [5, 5, 5, 2])])
    def test_train_shared_params_uneven_shard(self, world_size: int, rows: list[int]) -> None:
        assert run_ranks(world_size, uneven_table) == rows

    def test_shared_params_separate_fsdp_groups_error(self) -> None:
        run_ranks(2, shared_across_units)

    def test_layer_by_layer_shard_no_false_positive(self) -> None:
        run_ranks(2, layer_by_layer)
