"""A module without parameters, and what its unit does to a call."""

from __future__ import annotations

from typing import Any

import torch
from engine import TORCH, Engine, ours
from models import batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


class NestedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, more: tuple[Any, ...], *, factor: int, last: dict[str, Any]) -> Any:
        self.seen = [x, more[0], more[1][0], last["z"]]
        total = x
        for each in self.seen[1:]:
            total = total + each
        return {"total": total * factor, "more": (x,)}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def inputs_of(step: int, rank: int) -> list[torch.Tensor]:
    return [batch(10 * step + i, rank, 3).requires_grad_() for i in range(4)]


def call(model: nn.Module, x: list[torch.Tensor]) -> torch.Tensor:
    return model(x[0], (x[1], [x[2], "text"]), factor=2, last={"z": x[3]})["total"]


def assert_inputs_come_through(wrap_with: str, rank: int) -> None:
    """On a CPU as they are; where the device is another, on it. Gradients come through to the caller's own."""
    model: Any = NestedInputs()
    engine = ours()
    getattr(engine, wrap_with)(model)
    assert isinstance(model, engine.FSDPModule)
    model.to(device())
    for step in range(3):
        x = inputs_of(step, rank)
        total = call(model, x)
        assert [seen.device.type for seen in model.seen] == [device()] * 4
        if device() == "cpu":
            assert all(seen is one for seen, one in zip(model.seen, x, strict=True))
        assert torch.equal(total.cpu(), (x[0] + x[1] + x[2] + x[3]) * 2)
        total.sum().backward()
        assert all(torch.equal(one.grad, torch.full_like(one, 2)) for one in x)  # type: ignore[arg-type]
    casts = [cast_by_the_unit(each, wrap_with, rank) for each in (engine, TORCH)]
    assert casts[0] == casts[1] == ([torch.bfloat16] * 4, torch.float64), casts


def cast_by_the_unit(engine: Engine, wrap_with: str, rank: int) -> tuple[list[torch.dtype], torch.dtype]:
    """The hooks of a unit without parameters run: they cast what comes in and what goes out."""
    model = NestedInputs()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    getattr(engine, wrap_with)(model, mp_policy=policy)
    x = inputs_of(0, rank)
    total = call(model, x)
    total.sum().backward()
    assert all(one.grad is not None and one.grad.dtype == one.dtype for one in x)
    return [seen.dtype for seen in model.seen], total.dtype
