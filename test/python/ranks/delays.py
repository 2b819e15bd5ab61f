"""Ranks that are late, each time another one, at points that every engine has."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from language import blocks_of
from parity import Wrap, Wrapping

#: Before a unit's all-gather, after its forward, before its reduction, before the optimizer.
POINTS = ("gather", "forward", "reduce", "optimizer")


class Delays:
    """Of the blocks of a language model and of its root."""

    def __init__(self, *points: str) -> None:
        self.points = points
        self.passed = dict.fromkeys(points, 0)

    def wrapping(self, wrap: Wrap) -> Wrapping:
        def wrap_and_delay(engine: Any, model: Any) -> None:
            wrap(engine, model)
            self._install(model)

        return Wrapping(wrap_and_delay, after=lambda model, part: self._sleep("optimizer"))

    def assert_passed(self, times: int) -> None:
        assert all(count >= times for count in self.passed.values()), self.passed

    def _install(self, model: Any) -> None:
        for unit in [model, *blocks_of(model)]:
            # Before the hooks that the engine put there.
            unit.register_forward_pre_hook(lambda *_: self._sleep("gather"), prepend=True)
            unit.register_forward_hook(lambda *_: self._sleep("forward"))
        for block in blocks_of(model):
            block.norm_1.register_forward_pre_hook(self._at_the_end_of_backward)

    def _at_the_end_of_backward(self, _: Any, inputs: tuple[torch.Tensor]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self._sleep("reduce"))

    def _sleep(self, point: str) -> None:
        if point not in self.passed:
            return
        self.passed[point] += 1
        if self.passed[point] % dist.get_world_size() == dist.get_rank():
            time.sleep(0.002)
