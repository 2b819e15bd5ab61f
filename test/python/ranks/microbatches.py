"""Programs of three microbatches a step, for the rows of gradient accumulation."""

from __future__ import annotations

from typing import Any

from language import text_program
from models import batch
from parity import Program, WrapOne
from torch import nn
from training_models import mlps

MICROBATCHES = 3

#: Whose gradients are not averaged before the last microbatch: of all units, of two of the MLPs, or of the root's own.
MODES = ("all", "some_mlps", "root_only")


def accumulation_program(steps: int = 5) -> Program:
    """A linear layer, which is the root's, and three MLPs, which are units."""
    return Program(
        lambda: mlps(8, 3, nn.Linear(8, 8)),
        lambda model, number, rank: model(batch(number, rank, 8)).pow(2).mean(),
        steps=steps,
        parts=MICROBATCHES,
    )


def wrap_mlps(model: Any, wrap: WrapOne) -> None:
    for mlp in model[1:]:
        wrap(mlp)
    wrap(model)


def is_last(part: int) -> bool:
    return part == MICROBATCHES - 1


def reductions(mode: str) -> int:
    """A step's: a unit has one for each microbatch that it averages."""
    earlier = MICROBATCHES - 1
    return {"all": 4, "some_mlps": 4 + (3 - 2 + 1) * earlier, "root_only": 4 + 3 * earlier}[mode]


def set_flags(model: Any, part: int, mode: str, keep_full: bool = False, reduce_scatter_only: bool = False) -> None:
    """Before a microbatch. With `keep_full` those units keep full copies until the last one, too."""
    if mode == "some_mlps":
        units, recurse = [model[1], model[2]], True
    else:
        units, recurse = [model], mode == "all"
    for unit in units:
        if reduce_scatter_only:
            unit.set_requires_all_reduce(is_last(part), recurse=recurse)
        else:
            unit.set_requires_gradient_sync(is_last(part), recurse=recurse)
        if keep_full:
            unit.set_reshard_after_backward(is_last(part), recurse=recurse)


def pipeline_program() -> Program:
    return text_program(steps=4, parts=MICROBATCHES)


def begin_microbatch(model: Any, part: int, unshard_first: bool, keep_full: bool) -> None:
    """As a pipeline stage of 1F1B does: full copies may be brought first by hand, and may stay until the last."""
    if unshard_first and part == 0:
        for block in model.blocks:
            block.unshard(async_op=True)
        model.unshard(async_op=True)
    model.set_requires_gradient_sync(is_last(part))
    model.set_is_last_backward(is_last(part))
    if keep_full:
        model.set_reshard_after_backward(is_last(part))
