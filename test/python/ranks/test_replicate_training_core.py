"""The rows of replicate_training that train models cut into units, with ranks that are late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from delays import POINTS, Delays
from engine import TORCH, Engine, ours
from form import by_form
from language import prefetch_two_blocks, text_program, wrap_blocks
from models import local
from parity import Parity, Wrap, Wrapping, adam, assert_same_bits, momentum
from pool import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from training_models import WIDTHS, mlp_program, non_root_program, twice_program


def is_exact() -> bool:
    """Two summands have one sum."""
    return dist.get_world_size() == 2


def by_block(**options: Any) -> Wrap:
    return lambda engine, model: wrap_blocks(model, lambda part: engine.replicate(part, **options))


def children_and_root(engine: Engine, model: Any) -> None:
    for child in model:
        engine.replicate(child)
    engine.replicate(model)


def one_unit(rank: int) -> None:
    for widths, optimizer in zip(WIDTHS, [adam, momentum, momentum], strict=True):
        Parity(mlp_program(widths, optimizer=optimizer)).both(lambda e, model: e.replicate(model), is_exact())


def groups_with_late_ranks(rank: int) -> None:
    parity = Parity(text_program())
    wrap = by_block(mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",)))
    in_time = parity.both(wrap, is_exact())
    one_by_one = [[point] for point in POINTS] if is_exact() else []
    for points in [*by_form([], one_by_one), POINTS]:
        delays = Delays(*points)
        late = parity.run(ours(), delays.wrapping(wrap))
        delays.assert_passed(parity.program.steps)
        assert_same_bits(late, in_time)


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


def child_alone(rank: int) -> None:
    Parity(non_root_program()).both(children_and_root, is_exact())


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
    def set_event(model: Any) -> None:
        cuda = model.tokens.weight.device.type == "cuda"
        event = torch.cuda.current_stream().record_event() if cuda else torch.cpu.Event()
        model.set_post_optim_event(event)

    parity = Parity(text_program())
    without = parity.run(TORCH, by_block())
    assert_same_bits(parity.both(Wrapping(by_block(), after_optimizer=set_event)), without)


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
