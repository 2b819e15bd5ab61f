"""The rows of replicate_training about what programs see: inputs, registered parameters, casts."""

from __future__ import annotations

from functools import partial

import pytest
from both_functions import assert_registered_after_backward, assert_trains_in_float64, by_child
from engine import TORCH, Engine, ours
from nested_inputs import assert_inputs_come_through
from pool import run_ranks
from registration import TwoMlps
from torch.distributed.tensor import Replicate


def inputs_come_through(rank: int) -> None:
    assert_inputs_come_through("replicate", rank)


def two_mlps(engine: Engine, width: int, several: bool) -> TwoMlps:
    both = TwoMlps(engine, engine.replicate, width, several)
    for module in [*both.inner, both.model]:
        assert isinstance(module, engine.ReplicateModule) and isinstance(module, engine.FSDPModule)
    assert all(p.placements == (Replicate(),) for p in both.sharded.values())
    assert {p.device_mesh.mesh_dim_names for p in both.sharded.values()} == {("replicate",)}
    return both


def registered_after_forward(rank: int) -> None:
    for several in (False, True):
        seen = []
        for engine in (TORCH, ours()):
            both = two_mlps(engine, 3, several)
            both.assert_sharded()
            looks = [both.look()]
            for step in range(3):
                both.forward(step)
                # Until reshard() or backward the full ones are there, in every unit.
                both.assert_full(inner=True, root=True)
                looks.append(both.look())
                both.reshard()
                both.assert_sharded()
                looks.append(both.look())
            seen.append(looks)
        assert seen[0] == seen[1], f"several {several}"


def registered_after_backward(rank: int) -> None:
    for several in (False, True):
        assert_registered_after_backward(partial(two_mlps, width=8, several=several), f"several {several}")


def to_float64(rank: int, swap: bool) -> None:
    assert_trains_in_float64(by_child("replicate"), swap)


class TestReplicateForwardInputs:
    def test_root_move_forward_input_to_device(self) -> None:
        run_ranks(2, inputs_come_through)


class TestReplicateRegisteredParams:
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_param_registration_after_forward(self, world_size: int) -> None:
        run_ranks(world_size, registered_after_forward)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_param_registration_after_backward(self, world_size: int) -> None:
        run_ranks(world_size, registered_after_backward)


class TestReplicateCastAfterInit:
    @pytest.mark.parametrize("swap", [True, False])
    def test_to_float64_after_init(self, swap: bool) -> None:
        run_ranks(2, to_float64, swap)
