"""The rows of fully_shard_training that train models cut into units, with ranks that are late, and cut otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import both_functions
import pytest
import torch.distributed as dist
from both_functions import (
    assert_late_ranks_change_nothing,
    assert_offloading_changes_nothing,
    by_child,
    is_exact,
    set_optimizer_event,
)
from delays import POINTS, Delays
from devices import data_on
from engine import TORCH, Engine, ours
from language import blocks_of, prefetch_two_blocks, text_program
from parity import Parity, Trace, Wrap, Wrapping, adam, assert_same_bits, momentum
from pool import run_ranks
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from training_models import WIDTHS, mlp_program, non_root_program, twice_program


def reshards() -> list[bool | int | None]:
    """What reshard_after_forward can be: two ranks together hold everything where they are not all."""
    return [True, False, None] if dist.get_world_size() <= 2 else [True, False, None, 2]


def each_reshard(parity: Parity, wrapping: Callable[[Any], Wrapping | Wrap]) -> Trace:
    """Ours with every reshard_after_forward; of torch's engine the default, for none of them changes a result."""
    theirs = parity.run(TORCH, wrapping(None))
    for reshard in reshards():
        mine = parity.run(ours(), wrapping(reshard))
        if is_exact():
            assert_same_bits(mine, theirs)
    return theirs


def by_block(**options: Any) -> Wrap:
    return both_functions.by_block("fully_shard", **options)


def largest(parameter: nn.Parameter) -> Shard:
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


def one_unit(rank: int) -> None:
    for widths, optimizer in zip(WIDTHS, [adam, momentum, momentum], strict=True):
        Parity(mlp_program(widths, optimizer=optimizer)).both(
            lambda engine, model: engine.fully_shard(model), is_exact()
        )


def along_the_largest_dimension(rank: int) -> None:
    for widths in [(36, 18, 6), (18, 6, 24), (6, 17 * 6, 3)]:
        parity = Parity(mlp_program(widths))
        mine = parity.both(lambda e, model: e.fully_shard(model, shard_placement_fn=largest), is_exact())
        first = mine.model[0].weight
        assert first.placements == (Shard(0 if widths[1] > widths[0] else 1),), first.placements


def groups_with_late_ranks(rank: int) -> None:
    parity = Parity(text_program())
    each_reshard(parity, lambda reshard: by_block(reshard_after_forward=reshard))
    wrap = by_block(reshard_after_forward=True if is_exact() else 2)
    assert_late_ranks_change_nothing(parity, wrap, parity.run(ours(), wrap))


def offloaded(rank: int) -> None:
    assert_offloading_changes_nothing("fully_shard")


def gathered_asynchronously(rank: int) -> None:
    def by_hand(model: Any, part: int) -> None:
        # All are under way before the forward that uses them; the first is waited for by hand.
        handle = model.unshard(async_op=True)
        for block in model.blocks:
            block.unshard(async_op=True)
        for _ in range(2):
            handle.wait()

    def asynchronous(reshard: Any) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            by_block(reshard_after_forward=reshard)(engine, model)
            model._set_unshard_async_op(True)

        return wrap

    parity = Parity(text_program(steps=5))
    expected = each_reshard(parity, asynchronous)
    for reshard in reshards():
        trace = parity.run(ours(), Wrapping(by_block(reshard_after_forward=reshard), before=by_hand))
        assert_same_bits(trace, expected)
    late = Delays(*POINTS)
    assert_same_bits(parity.run(ours(), late.wrapping(asynchronous(True))), expected)
    late.assert_passed(parity.program.steps)


def child_alone(rank: int) -> None:
    each_reshard(Parity(non_root_program()), lambda reshard: by_child("fully_shard", reshard_after_forward=reshard))


def called_twice(rank: int) -> None:
    def wrapping(reshard: Any) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            engine.fully_shard(model.inner, reshard_after_forward=reshard)
            engine.fully_shard(model, reshard_after_forward=reshard)

        return wrap

    each_reshard(Parity(twice_program()), wrapping)


def gathered_ahead(rank: int) -> None:
    def wrapping(reshard: Any) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            by_block(reshard_after_forward=reshard)(engine, model)
            prefetch_two_blocks(model)

        return wrap

    parity = Parity(text_program(depth=8, steps=4))
    each_reshard(parity, wrapping)
    for ahead in (True, False):
        for engine in (TORCH, ours()):
            forward, backward = gathers_at_each_block(engine, parity, ahead)
            # The root, the block itself, and the two that it names.
            assert forward == [1 + min(i + 1 + 2 * ahead, 8) for i in range(8)], forward
            # The root's is there. Unless told otherwise, torch gathers the one before ahead; ours knows the order of
            # the last backward, and there was none.
            unasked = 1 if engine.name == "shardwise" else 2
            assert backward == [9 + min(i + (3 if ahead else unasked), 8) for i in range(8)], backward


def gathers_at_each_block(engine: Engine, parity: Parity, ahead: bool) -> tuple[list[int], list[int]]:
    """How many all-gathers were asked for when each block's own computation begins, in forward and in backward."""
    model: Any = parity.program.make().to(engine.device)
    by_block()(engine, model)
    if ahead:
        prefetch_two_blocks(model)
    forward: list[int] = []
    backward: list[int] = []
    with CommDebugMode() as mode:
        for block in blocks_of(model):
            block.norm_1.register_forward_pre_hook(lambda *_: forward.append(gathers(mode)))
            block.down.register_full_backward_hook(lambda *_: backward.append(gathers(mode)))
        with data_on(engine.device):
            parity.program.loss(model, 0, dist.get_rank()).backward()
    return forward, backward


def gathers(mode: CommDebugMode) -> int:
    return sum(count for operation, count in mode.get_comm_counts().items() if "gather" in str(operation))


def optimizer_event(rank: int) -> None:
    parity = Parity(text_program(steps=5))
    without = parity.run(TORCH, by_block())
    with_events = each_reshard(
        parity, lambda reshard: Wrapping(by_block(reshard_after_forward=reshard), after_optimizer=set_optimizer_event)
    )
    assert_same_bits(with_events, without)


class TestFullyShard1DTrainingCore:
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_train_parity_single_group_shard_dim0(self, world_size: int) -> None:
        run_ranks(world_size, one_unit)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_train_parity_single_group_shard_largest_dim(self, world_size: int) -> None:
        run_ranks(world_size, along_the_largest_dimension)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_train_parity_multi_group(self, world_size: int) -> None:
        run_ranks(world_size, groups_with_late_ranks, timeout=300)

    def test_train_parity_multi_group_cpu_offload_eager(self) -> None:
        run_ranks(2, offloaded)

    def test_train_parity_multi_group_unshard_async_op(self) -> None:
        run_ranks(2, gathered_asynchronously)

    def test_non_root_forward_backward(self) -> None:
        run_ranks(2, child_alone)

    def test_multi_forward_module(self) -> None:
        run_ranks(2, called_twice)

    def test_explicit_prefetching(self) -> None:
        run_ranks(2, gathered_ahead)

    def test_post_optim_event(self) -> None:
        run_ranks(2, optimizer_event)
