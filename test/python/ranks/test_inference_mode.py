"""Models that are made or wrapped in inference mode, and forwards there."""

from __future__ import annotations

from typing import Any

import torch
from engine import HALVES, ours
from engine import KINDS as SOME
from models import batch, local, mlp
from pool import on_ranks

KINDS = SOME | {"replicated, cast": lambda engine, module: engine.replicate(module, mp_policy=HALVES)}


def trained(rank: int, kind: str, is_made_there: bool, is_wrapped_there: bool) -> list[torch.Tensor]:
    with torch.inference_mode(is_made_there):
        model: Any = mlp(6, 8, 4)
    with torch.inference_mode(is_wrapped_there):
        for module in (model[0], model):
            KINDS[kind](ours(), module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = [model(batch(9, rank, 6)).clone()]
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank, 6)).float().pow(2).mean().backward()
        optimizer.step()
        with torch.inference_mode():
            seen.append(model(batch(9, rank, 6)).clone())
    return seen + [local(parameter).clone() for parameter in model.parameters()]


def as_outside(rank: int, kind: str) -> None:
    expected = trained(rank, kind, False, False)
    for where in ((False, True), (True, False), (True, True)):
        for index, (one, other) in enumerate(zip(trained(rank, kind, *where), expected, strict=True)):
            assert torch.equal(one, other), f"made and wrapped in inference mode: {where}, tensor {index}"


class TestInferenceMode:
    test_made_or_wrapped_there = on_ranks(2, as_outside, each=[*KINDS])
