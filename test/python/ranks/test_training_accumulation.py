"""The rows of fully_shard_training and replicate_training about microbatches: results, and collectives of a step."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from engine import TORCH, Engine, ours
from meshes import shared_mesh
from models import batch
from parity import Parity, Program, Wrapping, assert_same_bits
from pool import on_ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from training_models import mlps

MICROBATCHES = 3
SYNC, ALL_REDUCE, KEEP = "set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward"
#: Of which units something waits for the last microbatch, what, and how all of them are wrapped.
Case = tuple[str, tuple[str, ...], dict[str, Any]]
KEPT: dict[str, Any] = {"reshard_after_forward": False}
OFFLOADED: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
CASES: dict[str, list[Case]] = {
    "fully_shard": [
        ("all", (SYNC,), {}),
        ("all", (SYNC, KEEP), KEPT),
        ("some_mlps", (SYNC,), OFFLOADED),
        ("root_only", (SYNC, KEEP), KEPT),
    ],
    "replicate": [(mode, (SYNC,), {}) for mode in ("all", "some_mlps", "root_only")],
}
ON_A_GRID: list[Case] = [("all", (SYNC,), {}), ("all", (ALL_REDUCE,), {}), ("root_only", (ALL_REDUCE, KEEP), KEPT)]


def program() -> Program:
    """A layer, which is the root's, and three MLPs."""

    def loss(model: Any, number: int, rank: int) -> Any:
        return model(batch(number, rank, 8)).pow(2).mean()

    return Program(lambda: mlps(8, 3, nn.Linear(8, 8)), loss, steps=3, parts=MICROBATCHES)


def wrap_mlps(function: str, **options: Any) -> Any:
    def wrap(engine: Engine, model: Any) -> None:
        for part in (*model[1:], model):
            getattr(engine, function)(part, **options)

    return wrap


def is_last(part: int) -> bool:
    return part == MICROBATCHES - 1


def accumulated(rank: int, function: str, shape: tuple[int, ...]) -> None:
    if len(shape) == 2:
        cases, on = ON_A_GRID, {"mesh": shared_mesh(shape, ("dp_replicate", "dp_shard"))}
    else:
        cases, on = CASES[function], {}
    parity = Parity(program())
    for mode, methods, options in cases:

        def before(model: Any, part: int, mode: str = mode, methods: tuple[str, ...] = methods) -> None:
            units = [model[1], model[2]] if mode == "some_mlps" else [model]
            for unit, method in product(units, methods):
                getattr(unit, method)(is_last(part), recurse=mode != "root_only")

        wrapping = Wrapping(wrap_mlps(function, **options, **on), before=before)
        theirs, mine = (parity.run(engine, wrapping, counted=True) for engine in (TORCH, ours()))
        assert_same_bits(mine, theirs)
        counts = [[step.counts for step in trace.steps] for trace in (mine, theirs)]
        assert counts[0] == counts[1], f"{mode}, {methods}, {options}"


def out_of_sight(model: Any, part: int) -> None:
    """What is not averaged yet is no gradient of a parameter; full copies may have one."""
    for p in model.parameters():
        if isinstance(p, DTensor):
            assert (p.grad is not None and bool(p.grad.to_local().any())) == is_last(part)


def microbatched(rank: int, function: str) -> None:
    """As a pipeline stage of 1F1B does: full copies may be brought first by hand, and may stay until the last."""
    parity = Parity(program())
    theirs = None
    for unshard_first, keep_full in product((False, True), repeat=2):

        def before(model: Any, part: int, unshard_first: bool = unshard_first, keep_full: bool = keep_full) -> None:
            if unshard_first and part == 0:
                for unit in (*model[1:], model):
                    unit.unshard(async_op=True)
            model.set_requires_gradient_sync(is_last(part))
            model.set_is_last_backward(is_last(part))
            if keep_full:
                model.set_reshard_after_backward(is_last(part))

        options = KEPT if function == "fully_shard" else {}
        wrapping = Wrapping(wrap_mlps(function, **options), before=before, after=out_of_sight)
        theirs = theirs or parity.run(TORCH, wrapping)
        mine = parity.run(ours(), wrapping, counted=True)
        assert_same_bits(mine, theirs)
        if function == "fully_shard":
            # What is brought by hand is brought outside of what is counted.
            gathers = (4 if keep_full else 4 * MICROBATCHES) - 4 * unshard_first
            assert all(step.counts.get("_allgather_base_", 0) == gathers for step in mine.steps)


def on_two_dimensions(rank: int) -> None:
    mesh = shared_mesh((2, 2), ("dp_replicate", "dp_shard"))

    def before(model: Any, part: int) -> None:
        model.set_requires_gradient_sync(is_last(part))

    def after(model: Any, part: int) -> None:
        assert all(parameter.placements == (Replicate(), Shard(0)) for parameter in model.parameters())
        out_of_sight(model, part)

    Parity(program()).both(Wrapping(wrap_mlps("fully_shard", mesh=mesh), before=before, after=after))


class TestFullyShardGradientAccumulation:
    @pytest.mark.parametrize("shape", [(2,), (2, 2)])
    def test_gradient_accumulation(self, shape: tuple[int, ...]) -> None:
        run_ranks(math.prod(shape), accumulated, "fully_shard", shape)

    test_1f1b_microbatching = on_ranks(2, microbatched, "fully_shard")


class TestReplicateGradientAccumulation:
    test_gradient_accumulation = on_ranks(2, accumulated, "replicate", (2,))
    test_1f1b_microbatching = on_ranks(2, microbatched, "replicate")


class TestFullyShardHSDPTraining:
    test_train_parity_hsdp = on_ranks(4, on_two_dimensions)
