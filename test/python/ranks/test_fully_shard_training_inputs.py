"""The rows of fully_shard_training about what programs see: inputs, registered parameters, casts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from both_functions import assert_registered_after_backward, assert_trains_in_float64, by_child
from engine import TORCH, Engine, ours
from models import batch
from nested_inputs import assert_inputs_come_through
from parity import Parity, Program
from pool import run_ranks
from registration import TwoMlps
from torch import nn
from torch.distributed.tensor import DTensor


class NoInputs(nn.Module):
    """A forward without arguments; its data is a plain member."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.data = torch.zeros(4, 4)

    def forward(self) -> torch.Tensor:
        return torch.tanh(self.data @ self.weight) @ self.weight


def inputs_come_through(rank: int) -> None:
    assert_inputs_come_through("fully_shard", rank)


def no_inputs(rank: int) -> None:
    def loss(model: Any, number: int, data_rank: int) -> torch.Tensor:
        model.data = batch(number, data_rank, 4, rows=4).to(model.weight.device)
        output = model()
        assert output.shape == (4, 4)
        return output.pow(2).sum()

    Parity(Program(NoInputs, loss, steps=4)).both(lambda engine, model: engine.fully_shard(model))


RESHARDS = [True, False, 2, None]


def two_mlps(engine: Engine, width: int, reshard: Any, several: bool) -> TwoMlps:
    both = TwoMlps(engine, lambda part: engine.fully_shard(part, reshard_after_forward=reshard), width, several)
    for module in [*both.inner, both.model]:
        assert isinstance(module, engine.FSDPModule) and not isinstance(module, engine.ReplicateModule)
    return both


def registered_after_forward(rank: int) -> None:
    for reshard in RESHARDS:
        for several in (False, True):
            seen = []
            for engine in (TORCH, ours()):
                both = two_mlps(engine, 3, reshard, several)
                both.assert_sharded()
                looks = [both.look()]
                for step in range(3):
                    both.forward(step)
                    # Unset: the outermost unit keeps its full copies.
                    both.assert_full(inner=reshard is False, root=reshard in (False, None))
                    # Ours shows the shards; what two ranks hold together is out of sight.
                    if reshard == 2 and engine.name == "torch":
                        assert_spread_over_pairs(both.model)
                    if reshard != 2:
                        looks.append(both.look())
                    both.reshard()
                    both.assert_sharded()
                    looks.append(both.look())
                seen.append(looks)
            assert seen[0] == seen[1], f"reshard {reshard}, several {several}"


def assert_spread_over_pairs(model: nn.Module) -> None:
    """After forward two ranks together have everything."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh.tolist() == [[0, 1], [2, 3]], name


def registered_after_backward(rank: int) -> None:
    for reshard in RESHARDS:
        for several in (False, True):
            make = partial(two_mlps, width=8, reshard=reshard, several=several)
            assert_registered_after_backward(make, f"reshard {reshard}, several {several}")


def to_float64(rank: int, swap: bool) -> None:
    for reshard in (True, False):
        assert_trains_in_float64(by_child("fully_shard", reshard_after_forward=reshard), swap)


class TestFullyShardForwardInputs:
    def test_root_move_forward_input_to_device(self) -> None:
        run_ranks(2, inputs_come_through)

    def test_root_no_forward_inputs(self) -> None:
        run_ranks(2, no_inputs)


class TestFullyShardRegisteredParams:
    def test_param_registration_after_forward(self) -> None:
        run_ranks(4, registered_after_forward)

    def test_param_registration_after_backward(self) -> None:
        run_ranks(4, registered_after_backward)


class TestFullyShardCastAfterInit:
    @pytest.mark.parametrize("swap", [True, False])
    def test_to_float64_after_init(self, swap: bool) -> None:
        run_ranks(2, to_float64, swap)
