"""Whole parameters for a while, in wrapped models."""

from __future__ import annotations

import pytest
import torch
from models import batch, whole
from pool import run_ranks
from torch import nn

import shardwise
from shardwise import MixedPrecisionPolicy

KINDS = {
    "sharded": {},
    "kept": {"reshard_after_forward": False},
    "cast": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "replicated": None,
}


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


def wholes(layers: nn.Sequential) -> list[torch.Tensor]:
    return [whole(p) for p in layers.parameters()]


def written_back(rank: int, kind: str) -> None:
    ours, reference = model(), model()
    options = KINDS[kind]
    for part in (ours[2], ours):
        shardwise.replicate(part) if options is None else shardwise.fully_shard(part, **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    held = list(ours.parameters())
    for step in range(3):
        with shardwise.with_whole_parameters(ours):
            change(ours)
            if rank > 0:
                with torch.no_grad():
                    ours[0].bias.fill_(7)  # rank 0's values count
        change(reference)
        assert all(map(torch.equal, wholes(ours), wholes(reference)))
        assert all(one is other for one, other in zip(held, ours.parameters(), strict=True))
        if kind == "cast":
            continue
        loss = ours(batch(step, rank, 6)).pow(2).sum()
        loss.backward()
        for other in range(2):
            (reference(batch(step, other, 6)).pow(2).sum() / 2).backward()
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad)
        optimizer.step()
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            mine.grad = theirs.grad = None
            with torch.no_grad():
                theirs.copy_(whole(mine))

    def fail() -> None:
        with shardwise.with_whole_parameters(ours):
            ours[0].weight.data.zero_()
            raise ValueError("on purpose")

    # As a part of another model too. With torch's engine this ends the process.
    for shares in (ours, nn.Sequential(ours)):
        with pytest.raises(RuntimeError, match=r"share_memory\(\) cannot share the parameters of a"):
            shares.share_memory()
    with pytest.raises(ValueError, match="on purpose"):
        fail()
    assert all(map(torch.equal, wholes(ours), wholes(reference)))


@pytest.mark.parametrize("kind", KINDS)
def test_changes_of_whole_parameters_are_written_back(kind):
    run_ranks(2, written_back, kind)
