"""Whole parameters for a while, in wrapped models."""

from __future__ import annotations

import pytest
import torch
from engine import KINDS, ours
from models import Beside
from pool import on_ranks
from torch import nn

import shardwise


def model() -> nn.Sequential:
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
    layers.append(nn.Linear(6, 5))
    layers[3].weight = layers[0].weight
    return layers


def change(layers: nn.Sequential) -> None:
    with torch.no_grad():
        layers[0].weight /= layers[0].weight.norm()
        layers[2].weight[3] = 0
        vector = nn.utils.parameters_to_vector(layers.parameters())
        nn.utils.vector_to_parameters(vector.flip(0), layers.parameters())


def written_back(rank: int, kind: str) -> None:
    def wrap(layers: nn.Sequential) -> None:
        for part in (layers[2], layers):
            KINDS[kind](ours(), part)

    both = Beside(model(), wrap)
    held = list(both.model.parameters())
    for step in range(3):
        with shardwise.with_whole_parameters(both.model):
            change(both.model)
            if rank > 0:
                with torch.no_grad():
                    both.model[0].bias.fill_(7)  # rank 0's values count
        change(both.plain)
        both.check(f"step {step}")
        assert all(one is other for one, other in zip(held, both.model.parameters(), strict=True))
        if kind != "cast":
            both.train([step])

    def fail() -> None:
        with shardwise.with_whole_parameters(both.model):
            both.model[0].weight.data.zero_()
            raise ValueError("on purpose")

    # As a part of another model too. With torch's engine this ends the process.
    for shares in (both.model, nn.Sequential(both.model)):
        with pytest.raises(RuntimeError, match=r"share_memory\(\) cannot share the parameters of a"):
            shares.share_memory()
    with pytest.raises(ValueError, match="on purpose"):
        fail()
    both.check("after a failure")


class TestWholeParameters:
    test_changes_are_written_back = on_ranks(2, written_back, each=[*KINDS])
