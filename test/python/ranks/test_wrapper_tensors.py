"""Tensors that are around others, and have no memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Beside, batch
from own_gather import Twin
from pool import on_ranks
from torch import nn

import shardwise

KINDS = ("fully_shard", "replicate")


class Plain(Twin):
    """A twin that cannot be sharded."""

    fsdp_post_all_gather = None


class AsTwin(torch.autograd.Function):
    """Its gradient is around two tensors, of which the first counts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Twin(gradient.clone(), gradient.clone())


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, AsTwin.apply(self.weight), self.bias)


def gradients(rank: int, kind: str) -> None:
    torch.manual_seed(3)
    model, plain = Layer(5, 4), nn.Linear(5, 4)
    plain.load_state_dict(model.state_dict())
    Beside(model, getattr(shardwise, kind), lambda m, step, r: m(batch(step, r, 5)).pow(2).sum(), plain=plain).train(
        range(3)
    )


def parameters(rank: int, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(Plain(torch.ones(4, 4), torch.ones(4, 4)))
    with pytest.raises(ValueError, match=r"'1\.weight' is a Plain, which has no memory of its own.*ignored_params"):
        getattr(shardwise, kind)(model)
    getattr(shardwise, kind)(model, ignored_params={model[1].weight})


class TestWrapperTensors:
    test_gradients = on_ranks(2, gradients, each=KINDS)
    test_parameters_are_refused = on_ranks(2, parameters, each=KINDS)
