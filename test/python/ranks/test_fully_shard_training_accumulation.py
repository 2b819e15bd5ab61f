"""The rows of fully_shard_training about microbatches: results, and the collectives that a step takes."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import torch.distributed as dist
from engine import TORCH, Engine, ours
from form import by_form
from language import wrap_blocks
from microbatches import (
    MICROBATCHES,
    MODES,
    accumulation_program,
    begin_microbatch,
    pipeline_program,
    reductions,
    set_flags,
    wrap_mlps,
)
from parity import Parity, Wrapping, assert_same_bits
from pool import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy


class Case(NamedTuple):
    mode: str
    reshard_after_forward: bool | int
    #: Also of the units whose gradients wait.
    reshard_after_backward: bool
    offload: bool
    reduce_scatter_only: bool

    def has_numbers(self, mesh: DeviceMesh) -> bool:
        """torch's row leaves out those that no one has counted, and what has no meaning on this mesh. Here also some
        that are True by another name, what two ranks show, and offload with what is scattered only."""
        if self.reduce_scatter_only and (mesh.ndim == 1 or self.offload):
            return False
        pairs = self.reshard_after_forward == 2
        if pairs != (mesh.shape == (4,)) and (mesh.ndim == 1 or self.offload):
            return False
        return self.reshard_after_backward or (self.reshard_after_forward is False and self.mode != "some_mlps")

    def all_gathers(self) -> int:
        """Four units, each in forward and in backward unless its full copy is there."""
        if self.reshard_after_forward is not False:
            return (4 + 4) * MICROBATCHES
        if self.reshard_after_backward:
            return 4 * MICROBATCHES
        return 4 if self.mode == "all" else 4 + 3 * (MICROBATCHES - 1)

    def counts(self, mesh: DeviceMesh) -> dict[str, int]:
        scatters = 4 * MICROBATCHES if self.reduce_scatter_only else reductions(self.mode)
        counts = {"_allgather_base_": self.all_gathers(), "_reduce_scatter_base_": scatters}
        return counts if mesh.ndim == 1 else {**counts, "allreduce_": reductions(self.mode)}

    def wrapping(self, mesh: DeviceMesh) -> Wrapping:
        # Pinned memory needs an accelerator.
        policy = CPUOffloadPolicy(pin_memory=False) if self.offload else OffloadPolicy()

        def wrap(engine: Engine, model: Any) -> None:
            options = {"reshard_after_forward": self.reshard_after_forward, "offload_policy": policy}
            wrap_mlps(model, lambda part: engine.fully_shard(part, mesh=mesh, **options))

        def before(model: Any, part: int) -> None:
            set_flags(model, part, self.mode, not self.reshard_after_backward, self.reduce_scatter_only)

        return Wrapping(wrap, before=before)


EVERY = [Case(*axes) for axes in product(MODES, (True, False, 2), (True, False), (False, True), (False, True))]
#: Every fifth has each value of each axis beside several of the others.
CASES = by_form(EVERY[::5], EVERY)


def accumulated(rank: int, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    parity = Parity(accumulation_program(steps=3))
    # The sum over ranks is of as many summands as a dimension has ranks, and of two there is only one sum.
    is_exact = max(shape) == 2
    theirs = {}
    for case in CASES:
        if not case.has_numbers(mesh):
            continue
        try:
            trace = parity.run(ours(), case.wrapping(mesh), counted=True)
            for step in trace.steps:
                assert step.counts == case.counts(mesh), f"{step.counts} for {case.counts(mesh)}"
            # Torch's engine, once for all that differ only in when full copies are freed.
            key = (case.mode, case.reduce_scatter_only)
            if key not in theirs:
                theirs[key] = parity.run(TORCH, case.wrapping(mesh), counted=True)
                assert theirs[key].steps[0].counts == case.counts(mesh)
            if is_exact:
                assert_same_bits(trace, theirs[key])
        except Exception as error:
            raise AssertionError(f"{case} on {dist.get_world_size()} ranks as {shape}") from error


def microbatched(rank: int) -> None:
    parity = Parity(pipeline_program())
    theirs = None
    for unshard_first in (False, True):
        for keep_full in (False, True):

            def before(model: Any, part: int, first: bool = unshard_first, keep: bool = keep_full) -> None:
                begin_microbatch(model, part, first, keep)

            def wrap(engine: Engine, model: Any) -> None:
                wrap_blocks(model, lambda part: engine.fully_shard(part, reshard_after_forward=False))

            wrapping = Wrapping(wrap, before=before)
            theirs = theirs or parity.run(TORCH, wrapping)
            mine = parity.run(ours(), wrapping, counted=True)
            assert_same_bits(mine, theirs)
            # What is brought by hand is brought outside of what is counted.
            by_hand = 4 if unshard_first else 0
            gathers = (4 if keep_full else 4 * MICROBATCHES) - by_hand
            counts = {"_allgather_base_": gathers, "_reduce_scatter_base_": 4}
            assert [step.counts for step in mine.steps] == [{k: n for k, n in counts.items() if n}] * 4


class TestFullyShardGradientAccumulation:
    def test_gradient_accumulation(self) -> None:
        for shape in by_form([(2,), (2, 2)], [(2,), (4,), (2, 2)]):
            run_ranks(math.prod(shape), accumulated, shape, timeout=300)

    def test_1f1b_microbatching(self) -> None:
        run_ranks(2, microbatched)
