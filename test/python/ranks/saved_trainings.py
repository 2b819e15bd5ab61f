"""Trainings that are saved and go on elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from engine import Engine
from layouts import by_layer
from models import local
from parity import Program, adam
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from training_models import mlp_program


def program(steps: int = 6) -> Program:
    """Of the last layer the second rank has nothing. Adam's state is made before a load, and counts its steps."""
    return mlp_program((5, 7, 3, 1), steps=steps, optimizer=adam)


class Training:
    """One that goes on from where it is; what it begins with is of no use."""

    def __init__(self, engine: Engine, layout: str, rank: int, begin: bool = False, **options: Any) -> None:
        self.program = program()
        self.rank = rank
        self.model: Any = self.program.make()
        by_layer(layout, **options)(engine, self.model)
        if not begin:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(float("nan"))
        self.optimizer = self.program.optimizer(self.model)

    def run(self, numbers: Iterable[int]) -> Training:
        for number in numbers:
            self.optimizer.zero_grad()
            self.program.loss(self.model, number, self.rank).backward()
            self.optimizer.step()
        return self

    def values(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def state(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def load(self, state: dict[str, Any], options: StateDictOptions | None = None) -> Training:
        # A state dict that has nothing on this rank lets torch's set_state_dict() pass over it.
        set_model_state_dict(self.model, state["model"], options=options)
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state["optimizer"], options=options)
        return self

    def save_to(self, folder: str) -> Training:
        dcp.save(self.state(), checkpoint_id=folder)
        return self

    def load_from(self, folder: str) -> Training:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        return self.load(state)


def leaves_of(state: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """All that is in a nest of dicts and lists, by its place."""
    if isinstance(state, (dict, list)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for name, value in items:
            yield from leaves_of(value, f"{prefix}/{name}")
    else:
        yield prefix, state


def assert_same_state(mine: Any, theirs: Any) -> None:
    """Names, kinds of tensors, where they lie, and bits."""
    ours, others = dict(leaves_of(mine)), dict(leaves_of(theirs))
    assert list(ours) == list(others)
    for place, value in ours.items():
        other = others[place]
        assert type(value) is type(other), f"{place}: {type(value)} for {type(other)}"
        if not isinstance(value, torch.Tensor):
            assert value == other, f"{place}: {value} for {other}"
            continue
        if isinstance(value, DTensor):
            assert value._spec == other._spec, f"{place}: {value._spec} for {other._spec}"
        assert torch.equal(local(value), local(other)), f"{place}: {value} for {other}"
