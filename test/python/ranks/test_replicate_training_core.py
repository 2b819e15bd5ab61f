"""The rows of replicate_training that train models cut into units, with ranks that are late."""

from __future__ import annotations

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
from engine import TORCH, Engine, ours
from language import prefetch_two_blocks, text_program
from parity import Parity, Wrap, Wrapping, adam, assert_same_bits, momentum
from pool import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from training_models import WIDTHS, mlp_program, non_root_program, twice_program


def by_block(**options: Any) -> Wrap:
    return both_functions.by_block("replicate", **options)


def one_unit(rank: int) -> None:
    for widths, optimizer in zip(WIDTHS, [adam, momentum, momentum], strict=True):
        Parity(mlp_program(widths, optimizer=optimizer)).both(lambda e, model: e.replicate(model), is_exact())


def groups_with_late_ranks(rank: int) -> None:
    parity = Parity(text_program())
    wrap = by_block(mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",)))
    assert_late_ranks_change_nothing(parity, wrap, parity.both(wrap, is_exact()))


def offloaded(rank: int) -> None:
    assert_offloading_changes_nothing("replicate")


def child_alone(rank: int) -> None:
    Parity(non_root_program()).both(by_child("replicate"), is_exact())


def called_twice(rank: int) -> None:
    def wrap(engine: Engine, model: Any) -> None:
        engine.replicate(model.inner)
        engine.replicate(model)

    Parity(twice_program()).both(wrap, is_exact())


def nothing_gathered_ahead(rank: int) -> None:
    # Accepted, and without effect: nothing is ever gathered.
    def wrap(engine: Engine, model: Any) -> None:
        by_block()(engine, model)
        prefetch_two_blocks(model)

    parity = Parity(text_program(depth=8))
    parity.both(wrap)
    for engine in (TORCH, ours()):
        trace = parity.run(engine, wrap, counted=True)
        assert all(step.counts == {"allreduce_": 9} for step in trace.steps), trace.steps[0].counts


def optimizer_event(rank: int) -> None:
    parity = Parity(text_program())
    without = parity.run(TORCH, by_block())
    assert_same_bits(parity.both(Wrapping(by_block(), after_optimizer=set_optimizer_event)), without)


class TestReplicate1DTrainingCore:
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_train_parity_single_group(self, world_size: int) -> None:
        run_ranks(world_size, one_unit)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_train_parity_multi_groups(self, world_size: int) -> None:
        run_ranks(world_size, groups_with_late_ranks, timeout=300)

    def test_train_parity_multi_group_cpu_offload_eager(self) -> None:
        run_ranks(2, offloaded)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_non_root_forward_backward(self, world_size: int) -> None:
        run_ranks(world_size, child_alone)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_multi_forward_module(self, world_size: int) -> None:
        run_ranks(world_size, called_twice)

    def test_explicit_prefetching(self) -> None:
        run_ranks(2, nothing_gathered_ahead)

    def test_post_optim_event(self) -> None:
        run_ranks(2, optimizer_event)
