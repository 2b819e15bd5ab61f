"""Gradients that come to a full parameter past autograd's hooks, as those of torch's zero-bubble pipelines do."""

from __future__ import annotations

import torch
from models import batch
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardwise

HALVES = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MICROBATCHES = 8


def added_by_hand(rank: int, kind: str) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4, bias=False))
    wrap = getattr(shardwise, kind)
    wrap(model[1], mp_policy=HALVES)
    wrap(model, mp_policy=HALVES)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    expected: dict[str, torch.Tensor] = {}
    for part in range(MICROBATCHES):
        if part == MICROBATCHES - 1:
            model.set_requires_gradient_sync(True)
        out = model(batch(part, rank, 6)).pow(2).sum()
        if kind == "fully_shard":
            model.unshard()
            model[1].unshard()
        # What follows is what stage_backward_weight() does: a backward of its own, and the sum by hand.
        leaves = {name: getattr(model[int(name[0])], name[2:]) for name, _ in model.named_parameters()}
        found = torch.autograd.grad(out, list(leaves.values()))
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            assert leaf.dtype == torch.bfloat16
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
            expected[name] = expected.get(name, 0) + gradient.float()
    shardwise._state.state_of(model)._root_post_backward_final_callback()
    for module in (model, model[1]):
        module.reshard()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        total = expected[name].clone()
        torch.distributed.all_reduce(total)
        mean = total / 2
        torch.testing.assert_close(parameter.grad.full_tensor(), mean, rtol=1e-6, atol=1e-6 * float(mean.abs().max()))


class TestLeafGradients:
    test_added_by_hand = on_ranks(2, added_by_hand, each=["fully_shard", "replicate"])
