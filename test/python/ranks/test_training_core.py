"""The rows of fully_shard_training and replicate_training that train models in units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from devices import data_on
from engine import TORCH, Engine, ours
from language import blocks_of, by_block, prefetch_two_blocks, text_program
from models import local
from parity import Parity, Trace, Wrap, Wrapping, adam, assert_same_bits, by_child, momentum
from pool import on_ranks
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from training_models import SETTINGS, WIDTHS, largest, mlp_program, non_root_program, twice_program


def each_setting(function: str, parity: Parity, wrapping: Callable[..., Wrapping | Wrap]) -> Trace:
    """Ours with every setting, beside torch's with none. Of two ranks every sum is the same to the bit."""
    theirs = parity.run(TORCH, wrapping())
    for options in SETTINGS[function]:
        assert_same_bits(parity.run(ours(), wrapping(**options)), theirs)
    return theirs


def one_unit(rank: int, function: str) -> None:
    for widths, optimizer in zip(WIDTHS, [adam, momentum, momentum], strict=True):
        Parity(mlp_program(widths, optimizer=optimizer)).both(lambda engine, model: getattr(engine, function)(model))


def along_the_largest_dimension(rank: int) -> None:
    for widths in [(36, 18, 6), (18, 6, 24), (6, 17 * 6, 3)]:
        mine = Parity(mlp_program(widths)).both(lambda e, model: e.fully_shard(model, shard_placement_fn=largest))
        first = mine.model[0].weight
        assert first.placements == (Shard(0 if widths[1] > widths[0] else 1),), first.placements


def by_blocks(rank: int, function: str) -> None:
    each_setting(function, Parity(text_program()), lambda **options: by_block(function, **options))


def offloaded(rank: int, function: str) -> None:
    # On a mesh of CPUs nothing is moved: what there is to see is that all of it is where it should be.
    def on_the_host(model: Any, part: int) -> None:
        for parameter in model.parameters():
            assert local(parameter).is_cpu and parameter.is_cpu
            assert parameter.grad is None or local(parameter.grad).is_cpu

    parity = Parity(text_program())
    theirs = parity.run(TORCH, by_block(function, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    for pin in (False, True):
        # torch pins by an accelerator, and without one cannot.
        if pin and ours().name == "torch" and not torch.cuda.is_available():
            continue
        wrap = by_block(function, offload_policy=CPUOffloadPolicy(pin_memory=pin))
        assert_same_bits(parity.run(ours(), Wrapping(wrap, before=on_the_host, after=on_the_host)), theirs)


def gathered_asynchronously(rank: int) -> None:
    def by_hand(model: Any, part: int) -> None:
        # All are under way before the forward that uses them; the first is waited for by hand.
        handle = model.unshard(async_op=True)
        for block in model.blocks:
            block.unshard(async_op=True)
        for _ in range(2):
            handle.wait()

    def asynchronous(**options: Any) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            by_block("fully_shard", **options)(engine, model)
            model._set_unshard_async_op(True)

        return wrap

    parity = Parity(text_program(steps=5))
    expected = each_setting("fully_shard", parity, asynchronous)
    for options in SETTINGS["fully_shard"]:
        trace = parity.run(ours(), Wrapping(by_block("fully_shard", **options), before=by_hand))
        assert_same_bits(trace, expected)


def child_alone(rank: int, function: str) -> None:
    each_setting(function, Parity(non_root_program()), lambda **options: by_child(function, **options))


def called_twice(rank: int, function: str) -> None:
    each_setting(function, Parity(twice_program()), lambda **options: by_child(function, **options))


def gathered_ahead(rank: int, function: str) -> None:
    def wrapping(**options: Any) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            by_block(function, **options)(engine, model)
            prefetch_two_blocks(model)

        return wrap

    parity = Parity(text_program(depth=8, steps=4))
    each_setting(function, parity, wrapping)
    if function == "replicate":
        # Accepted, and without effect: nothing is ever gathered.
        for engine in (TORCH, ours()):
            trace = parity.run(engine, wrapping(), counted=True)
            assert all(step.counts == {"allreduce_": 9} for step in trace.steps), trace.steps[0].counts
        return
    for engine in (TORCH, ours()):
        forward, backward = gathers_at_each_block(engine, parity)
        # The root, the block itself, and the two that it names; in backward the root's is there.
        assert forward == [1 + min(i + 3, 8) for i in range(8)], forward
        assert backward == [9 + min(i + 3, 8) for i in range(8)], backward


def gathers_at_each_block(engine: Engine, parity: Parity) -> tuple[list[int], list[int]]:
    """How many all-gathers were asked for when each block's own computation begins, in forward and in backward."""
    model: Any = parity.program.make().to(engine.device)
    by_block("fully_shard")(engine, model)
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


def set_optimizer_event(model: Any) -> None:
    cuda = model.tokens.weight.device.type == "cuda"
    model.set_post_optim_event(torch.cuda.current_stream().record_event() if cuda else torch.cpu.Event())


def optimizer_event(rank: int, function: str) -> None:
    parity = Parity(text_program())
    with_events = each_setting(
        function,
        parity,
        lambda **options: Wrapping(by_block(function, **options), after_optimizer=set_optimizer_event),
    )
    assert_same_bits(with_events, parity.run(TORCH, by_block(function)))


class TestFullyShard1DTrainingCore:
    test_train_parity_single_group_shard_dim0 = on_ranks(2, one_unit, "fully_shard")
    test_train_parity_single_group_shard_largest_dim = on_ranks(2, along_the_largest_dimension)
    test_train_parity_multi_group = on_ranks(2, by_blocks, "fully_shard", timeout=300)
    test_train_parity_multi_group_cpu_offload_eager = on_ranks(2, offloaded, "fully_shard")
    test_train_parity_multi_group_unshard_async_op = on_ranks(2, gathered_asynchronously)
    test_non_root_forward_backward = on_ranks(2, child_alone, "fully_shard")
    test_multi_forward_module = on_ranks(2, called_twice, "fully_shard")
    test_explicit_prefetching = on_ranks(2, gathered_ahead, "fully_shard")
    test_post_optim_event = on_ranks(2, optimizer_event, "fully_shard")


class TestReplicate1DTrainingCore:
    test_train_parity_single_group = on_ranks(2, one_unit, "replicate")
    test_train_parity_multi_groups = on_ranks(2, by_blocks, "replicate", timeout=300)
    test_train_parity_multi_group_cpu_offload_eager = on_ranks(2, offloaded, "replicate")
    test_non_root_forward_backward = on_ranks(2, child_alone, "replicate")
    test_multi_forward_module = on_ranks(2, called_twice, "replicate")
    test_explicit_prefetching = on_ranks(2, gathered_ahead, "replicate")
    test_post_optim_event = on_ranks(2, optimizer_event, "replicate")
