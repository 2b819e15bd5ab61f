"""The rows of fully_shard_training that train models cut into units, with ranks that are late, and cut otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from delays import POINTS, Delays
from engine import TORCH, Engine, ours
from language import blocks_of, prefetch_two_blocks, text_program, wrap_blocks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from training import Parity, Wrap, Wrapping, assert_same_bits, local
from training_models import WIDTHS, mlp_program, non_root_program, twice_program

from shardwise.testing import run_ranks


def reshards() -> list[bool | int | None]:
    """What reshard_after_forward can be: two ranks together hold everything where they are not all."""
    return [True, False, None] if dist.get_world_size() <= 2 else [True, False, None, 2]


def is_exact() -> bool:
    """Two summands have one sum."""
    return dist.get_world_size() == 2


def by_block(**options: Any) -> Wrap:
    return lambda engine, model: wrap_blocks(model, lambda part: engine.fully_shard(part, **options))


def largest(parameter: nn.Parameter) -> Shard:
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


def one_unit(rank: int) -> None:
    for widths in WIDTHS:
        Parity(mlp_program(widths)).both(lambda engine, model: engine.fully_shard(model), is_exact())


def along_the_largest_dimension(rank: int) -> None:
    for widths in [(32, 16, 8), (16, 8, 24), (8, 17 * 4, 3)]:
        parity = Parity(mlp_program(widths))
        mine = parity.both(lambda e, model: e.fully_shard(model, shard_placement_fn=largest), is_exact())
        first = mine.model[0].weight
        assert first.placements == (Shard(0 if widths[1] > widths[0] else 1),), first.placements


def groups_with_late_ranks(rank: int) -> None:
    parity = Parity(text_program())
    for reshard in reshards():
        wrap = by_block(reshard_after_forward=reshard)
        theirs = parity.run(TORCH, wrap)
        mine = parity.run(ours(), wrap)
        if is_exact():
            assert_same_bits(mine, theirs)
        late_at = [[point] for point in POINTS] if reshard is True else []
        for points in [*late_at, list(POINTS)]:
            delays = Delays(*points)
            late = parity.run(ours(), delays.wrapping(wrap))
            delays.assert_passed(parity.program.steps)
            assert_same_bits(late, mine)


def offloaded(rank: int) -> None:
    # On a mesh of CPUs nothing is moved: what there is to see is that all of it is where it should be.
    def on_the_host(model: Any, part: int) -> None:
        for parameter in model.parameters():
            assert local(parameter).is_cpu and parameter.is_cpu
            assert parameter.grad is None or local(parameter.grad).is_cpu

    parity = Parity(text_program())
    theirs = parity.run(TORCH, by_block(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    for pin in (False, True):
        # torch pins by an accelerator, and without one cannot.
        if pin and ours().name == "torch" and not torch.cuda.is_available():
            continue
        wrap = by_block(offload_policy=CPUOffloadPolicy(pin_memory=pin))
        assert_same_bits(parity.run(ours(), Wrapping(wrap, before=on_the_host, after=on_the_host)), theirs)
        late = parity.run(ours(), Delays(*POINTS).wrapping(wrap))
        assert_same_bits(late, theirs)


def gathered_asynchronously(rank: int) -> None:
    def by_hand(model: Any, part: int) -> None:
        # All are under way before the forward that uses them; the first is waited for by hand.
        handle = model.unshard(async_op=True)
        for block in model.blocks:
            block.unshard(async_op=True)
        for _ in range(2):
            handle.wait()

    parity = Parity(text_program())
    expected = parity.run(TORCH, by_block())
    for reshard in reshards():

        def asynchronous(engine: Engine, model: Any, reshard: Any = reshard) -> None:
            by_block(reshard_after_forward=reshard)(engine, model)
            model._set_unshard_async_op(True)

        for engine in (TORCH, ours()):
            assert_same_bits(parity.run(engine, asynchronous), expected)
            by_hand_too = Wrapping(by_block(reshard_after_forward=reshard), before=by_hand)
            assert_same_bits(parity.run(engine, by_hand_too), expected)
        late = Delays(*POINTS)
        assert_same_bits(parity.run(ours(), late.wrapping(asynchronous)), expected)
        late.assert_passed(parity.program.steps)


def child_alone(rank: int) -> None:
    parity = Parity(non_root_program())
    for reshard in reshards():

        def wrap(engine: Engine, model: Any, reshard: Any = reshard) -> None:
            for child in model:
                engine.fully_shard(child, reshard_after_forward=reshard)
            engine.fully_shard(model, reshard_after_forward=reshard)

        parity.both(wrap, is_exact())


def called_twice(rank: int) -> None:
    parity = Parity(twice_program())
    for reshard in reshards():

        def wrap(engine: Engine, model: Any, reshard: Any = reshard) -> None:
            engine.fully_shard(model.inner, reshard_after_forward=reshard)
            engine.fully_shard(model, reshard_after_forward=reshard)

        parity.both(wrap, is_exact())


def gathered_ahead(rank: int) -> None:
    parity = Parity(text_program(depth=8, steps=5))
    for reshard in reshards():

        def wrap(engine: Engine, model: Any, reshard: Any = reshard) -> None:
            by_block(reshard_after_forward=reshard)(engine, model)
            prefetch_two_blocks(model)

        parity.both(wrap, is_exact())
    for ahead in (True, False):
        for engine in (TORCH, ours()):
            forward, backward = gathers_at_each_block(engine, parity, ahead)
            # The root, the block itself, and the two that it names.
            assert forward == [1 + min(i + 1 + 2 * ahead, 8) for i in range(8)], forward
            # Unless told otherwise, the one before it is gathered ahead.
            more = [min(i + (3 if ahead else 2), 8) for i in range(8)]
            assert [count - 9 for count in backward] == more or not ahead and len(backward) == 8, backward


def gathers_at_each_block(engine: Engine, parity: Parity, ahead: bool) -> tuple[list[int], list[int]]:
    """How many all-gathers were asked for when each block's own computation begins, in forward and in backward."""
    model: Any = parity.program.make()
    by_block()(engine, model)
    if ahead:
        prefetch_two_blocks(model)
    forward: list[int] = []
    backward: list[int] = []
    with CommDebugMode() as mode:
        for block in blocks_of(model):
            block.norm_1.register_forward_pre_hook(lambda *_: forward.append(mode.get_total_counts()))
            block.down.register_full_backward_hook(lambda *_: backward.append(gathers(mode)))
        parity.program.loss(model, 0, dist.get_rank()).backward()
    return forward, backward


def gathers(mode: CommDebugMode) -> int:
    return sum(count for operation, count in mode.get_comm_counts().items() if "gather" in str(operation))


def optimizer_event(rank: int) -> None:
    def set_event(model: Any) -> None:
        cuda = model.tokens.weight.device.type == "cuda"
        event = torch.cuda.current_stream().record_event() if cuda else torch.cpu.Event()
        model.set_post_optim_event(event)

    parity = Parity(text_program())
    for reshard in reshards():
        wrap = by_block(reshard_after_forward=reshard)
        without = parity.run(TORCH, wrap)
        with_events = parity.both(Wrapping(wrap, after_optimizer=set_event))
        assert_same_bits(with_events, without)


class TestFullyShard1DTrainingCore:
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_train_parity_single_group_shard_dim0(self, world_size: int) -> None:
        run_ranks(world_size, one_unit)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_train_parity_single_group_shard_largest_dim(self, world_size: int) -> None:
        run_ranks(world_size, along_the_largest_dimension)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_train_parity_multi_group(self, world_size: int) -> None:
        run_ranks(world_size, groups_with_late_ranks)

    def test_train_parity_multi_group_cpu_offload_eager(self) -> None:
        run_ranks(2, offloaded)

    def test_train_parity_multi_group_unshard_async_op(self) -> None:
        run_ranks(2, gathered_asynchronously)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_non_root_forward_backward(self, world_size: int) -> None:
        run_ranks(world_size, child_alone)

    def test_multi_forward_module(self) -> None:
        run_ranks(2, called_twice)

    def test_explicit_prefetching(self) -> None:
        run_ranks(2, gathered_ahead)

    def test_post_optim_event(self) -> None:
        run_ranks(2, optimizer_event)
