"""Mixed precision of wrapped modules under torch.func's transforms of what they are given."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from engine import TORCH, ours
from models import batch, mlp, rounded_backward, step_all
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

#: Before that, the hooks of torch's engine run into the transform.
ENGINES = 2 if torch.__version__ >= "2.15" else 1


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Of the outputs, and of their derivative in a direction of the inputs."""
    x, direction = (batch(2 * step + part, rank, 6).to(next(model.parameters()).dtype) for part in range(2))
    out, tangent = torch.func.jvp(model, (x,), (direction,))
    return out.float().pow(2).mean() + tangent.float().pow(2).mean()


def input_jvp(rank: int, function: str) -> None:
    for low in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(low, torch.float32, output_dtype=torch.float32)
        models: list[Any] = [mlp(6, 8, 4) for _ in range(1 + ENGINES)]
        for engine, model in zip((ours(), TORCH), models[1:], strict=False):
            for part in (model[0], model[2], model):
                getattr(engine, function)(part, mp_policy=policy)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for step in range(3):
            rounded_backward(models[0], partial(loss_of, step=step), 2, low, torch.float32)
            for model in models[1:]:
                loss_of(model, rank, step).backward()
            close = {"rtol": 1e-5, "atol": 1e-6} if low is None else {"rtol": 5e-2, "atol": 2e-2}
            for name, whole in models[0].named_parameters():
                found = [model.get_parameter(name).grad for model in models[1:]]
                for gradient in found:
                    assert isinstance(gradient, DTensor), name
                    torch.testing.assert_close(gradient.full_tensor(), whole.grad, **close)
                assert all(torch.equal(found[0].to_local(), each.to_local()) for each in found[1:]), name
            step_all(optimizers)


class TestReplicateMixedPrecision:
    test_input_jvp = on_ranks(2, input_jvp, "replicate")
    test_input_jvp_of_shards = on_ranks(2, input_jvp, "fully_shard")
