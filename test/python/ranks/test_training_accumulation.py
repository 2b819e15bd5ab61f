"""The rows of fully_shard_training and replicate_training about microbatches: results, and collectives of a step."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import torch.distributed as dist
from engine import TORCH, Engine, ours
from form import by_form
from language import by_block, text_program
from models import batch
from parity import Parity, Program, WrapOne, Wrapping, assert_same_bits, by_child
from pool import run_ranks
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from training_models import mlps

MICROBATCHES = 3
#: Whose gradients are not averaged before the last microbatch: of all units, of two of the MLPs, or of the root's own.
MODES = ("all", "some_mlps", "root_only")


def program_of(width: int, first: type[nn.Module], *sizes: int) -> Program:
    """A layer and three MLPs."""
    return Program(
        lambda: mlps(width, 3, first(*sizes)),
        lambda model, number, rank: model(batch(number, rank, width)).pow(2).mean(),
        steps=3,
        parts=MICROBATCHES,
    )


def wrap_mlps(model: Any, wrap: WrapOne) -> None:
    """The first layer is the root's."""
    for mlp in model[1:]:
        wrap(mlp)
    wrap(model)


def is_last(part: int) -> bool:
    return part == MICROBATCHES - 1


def reductions(mode: str) -> int:
    """A step's: a unit has one for each microbatch that it averages."""
    earlier = MICROBATCHES - 1
    return {"all": 4, "some_mlps": 4 + (3 - 2 + 1) * earlier, "root_only": 4 + 3 * earlier}[mode]


def set_flags(model: Any, part: int, mode: str, keep_full: bool = False, reduce_scatter_only: bool = False) -> None:
    """Before a microbatch. With `keep_full` those units keep full copies until the last one, too."""
    if mode == "some_mlps":
        units, recurse = [model[1], model[2]], True
    else:
        units, recurse = [model], mode == "all"
    for unit in units:
        if reduce_scatter_only:
            unit.set_requires_all_reduce(is_last(part), recurse=recurse)
        else:
            unit.set_requires_gradient_sync(is_last(part), recurse=recurse)
        if keep_full:
            unit.set_reshard_after_backward(is_last(part), recurse=recurse)


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
    parity = Parity(program_of(8, nn.Linear, 8, 8))
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


def accumulated_copies(rank: int) -> None:
    parity = Parity(program_of(8, nn.Linear, 8, 8))
    for mode in MODES:
        wrapping = Wrapping(
            lambda engine, model: wrap_mlps(model, engine.replicate),
            before=lambda model, part, mode=mode: set_flags(model, part, mode),
        )
        traces = [parity.run(engine, wrapping, counted=True) for engine in (TORCH, ours())]
        for step in (step for trace in traces for step in trace.steps):
            assert step.counts == {"allreduce_": reductions(mode)}, f"{mode}: {step.counts}"
        assert_same_bits(traces[1], traces[0])


def microbatched(rank: int, function: str) -> None:
    """As a pipeline stage of 1F1B does: full copies may be brought first by hand, and may stay until the last."""

    def out_of_sight(model: Any, part: int) -> None:
        # What is not averaged yet is no gradient of a parameter; full copies may have one.
        for p in model.parameters():
            if isinstance(p, DTensor):
                assert (p.grad is not None and bool(p.grad.to_local().any())) == is_last(part)

    parity = Parity(text_program(parts=MICROBATCHES))
    theirs = None
    for unshard_first, keep_full in product((False, True), repeat=2):

        def before(model: Any, part: int, unshard_first: bool = unshard_first, keep_full: bool = keep_full) -> None:
            if unshard_first and part == 0:
                for unit in (*model.blocks, model):
                    unit.unshard(async_op=True)
            model.set_requires_gradient_sync(is_last(part))
            model.set_is_last_backward(is_last(part))
            if keep_full:
                model.set_reshard_after_backward(is_last(part))

        options = {"reshard_after_forward": False} if function == "fully_shard" else {}
        wrapping = Wrapping(by_block(function, **options), before=before, after=out_of_sight)
        theirs = theirs or parity.run(TORCH, wrapping)
        mine = parity.run(ours(), wrapping, counted=True)
        assert_same_bits(mine, theirs)
        # What is brought by hand is brought outside of what is counted.
        gathers = (4 if keep_full else 4 * MICROBATCHES) - 4 * unshard_first
        counts = {"_allgather_base_": gathers, "_reduce_scatter_base_": 4}
        if function == "replicate":
            counts = {"allreduce_": 4}
        assert all(step.counts == {k: n for k, n in counts.items() if n} for step in mine.steps)


def on_grid(mesh: Any, reshard: bool, checkpointed: bool, sync_at_last: bool, offload: bool = False) -> Wrapping:
    # Pinned memory needs an accelerator.
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()

    def wrap(engine: Engine, model: Any) -> None:
        if checkpointed:
            for module in model:
                checkpoint(module)
        by_child("fully_shard", mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)(engine, model)

    def before(model: Any, part: int) -> None:
        if sync_at_last:
            model.set_requires_gradient_sync(is_last(part))

    def after(model: Any, part: int) -> None:
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor) and parameter.placements == (Replicate(), Shard(0))
            if parameter.to_local().numel() > 0:
                # Earlier ones are out of sight until they are averaged; then all are there.
                has_one = parameter.grad is not None and bool(parameter.grad.to_local().any())
                assert has_one == (is_last(part) or not sync_at_last)

    return Wrapping(wrap, before=before, after=after)


def on_two_dimensions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for width in by_form((3,), (3, 16, 17)):
        parity = Parity(program_of(width, nn.LayerNorm, width))
        for sync_at_last in (True, False):
            theirs = parity.run(TORCH, on_grid(mesh, True, False, sync_at_last))
            # Two ranks along each dimension: every sum is of two.
            every = [(True, False, False), (True, True, False), (False, False, True), (False, True, True)]
            for reshard, checkpointed, offload in by_form(every[sync_at_last::2], every):
                mine = parity.run(ours(), on_grid(mesh, reshard, checkpointed, sync_at_last, offload))
                assert_same_bits(mine, theirs)


class TestFullyShardGradientAccumulation:
    def test_gradient_accumulation(self) -> None:
        for shape in by_form([(2,), (2, 2)], [(2,), (4,), (2, 2)]):
            run_ranks(math.prod(shape), accumulated, shape, timeout=300)

    def test_1f1b_microbatching(self) -> None:
        run_ranks(2, microbatched, "fully_shard")


class TestReplicateGradientAccumulation:
    def test_gradient_accumulation(self) -> None:
        run_ranks(2, accumulated_copies)

    def test_1f1b_microbatching(self) -> None:
        run_ranks(2, microbatched, "replicate")


class TestFullyShardHSDPTraining:
    def test_train_parity_hsdp(self) -> None:
        run_ranks(4, on_two_dimensions, timeout=300)
