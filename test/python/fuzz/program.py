"""A program: a model, its units, and what is done with them. Its text is enough to write it by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fuzz.model import Spec


@dataclass
class Unit:
    """One call of fully_shard() or replicate()."""

    api: str
    modules: list[str]
    reshard_after_forward: bool | int | None = None
    #: Of MixedPrecisionPolicy.
    policy: dict[str, Any] = field(default_factory=dict)
    #: The last dimension where it can be divided evenly.
    is_last_dim: bool = False
    is_offloaded: bool = False
    ignored: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.modules[0]

    def text(self) -> str:
        told = [str(self.modules[0] if len(self.modules) == 1 else self.modules)]
        if self.api == "fully_shard":
            told.append(f"reshard_after_forward={self.reshard_after_forward}")
        told += [f"{key}={value}" for key, value in self.policy.items()]
        told += ["the last dimension where even"] if self.is_last_dim else []
        told += ["CPUOffloadPolicy(pin_memory=False)"] if self.is_offloaded else []
        told += [f"ignored={self.ignored}"] if self.ignored else []
        return f"{self.api}({', '.join(told)})"


@dataclass
class Microbatch:
    """One backward of the sum of some forwards, and what is set before it."""

    #: A method of the unit, its arguments: applied in order, before forward.
    calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    forwards: int = 1
    #: Resharded by hand between forward and backward.
    resharded: list[str] = field(default_factory=list)
    needs_input_grad: bool = False
    #: A unit that runs by itself; "" is the model.
    module: str = ""

    def text(self) -> str:
        lines = [
            f"{unit or 'model'}.{method}({', '.join([*map(str, args), *(f'{k}={v}' for k, v in kwargs.items())])})"
            for unit, method, args, kwargs in self.calls
        ]
        grad = ", inputs require gradients" if self.needs_input_grad else ""
        lines.append(f"{self.forwards} forward of {self.module or 'model'}{grad}")
        lines += [f"{unit or 'model'}.reshard()" for unit in self.resharded]
        return "; ".join([*lines, "backward"])


@dataclass
class Step:
    orders: dict[str, list[int]]
    microbatches: list[Microbatch]
    #: By name: whether it requires a gradient from now on.
    freezes: dict[str, bool]
    set_to_none: bool
    evaluates: bool

    def text(self, number: int) -> str:
        lines = [f"step {number}:"]
        lines += [f"  {name}.requires_grad_({flag})" for name, flag in self.freezes.items()]
        lines += [f"  {path or 'model'} runs {order}" for path, order in self.orders.items()]
        lines += [f"  {microbatch.text()}" for microbatch in self.microbatches]
        lines += [f"  optimizer.step(); zero_grad(set_to_none={self.set_to_none})"]
        return "\n".join(lines + (["  a forward under no_grad"] if self.evaluates else []))


@dataclass
class Program:
    seed: int
    world_size: int
    width: int
    model: Spec
    units: list[Unit]
    #: Sizes of the mesh of fully_shard; replicate has all ranks in one dimension.
    mesh: tuple[int, ...]
    frozen: list[str]
    optimizer: str
    steps: list[Step]
    #: Results must be equal to the bit.
    is_exact: bool
    #: As many collectives of these kinds are expected.
    sums_are_counted: bool
    gathers_are_counted: bool

    def text(self) -> str:
        name = f"test/python/interop/test_fuzz.py -k 'programs and {self.world_size}'"
        lines = [
            f"program {self.seed} on {self.world_size} ranks, mesh {self.mesh}, width {self.width}",
            f"again: SHARDWISE_FUZZ_SEED={self.seed} SHARDWISE_FUZZ_PROGRAMS=1 python -m pytest {name}",
            self.model.text(),
            *[unit.text() for unit in self.units],
            f"frozen: {self.frozen}",
            f"optimizer: {self.optimizer}",
            *[step.text(number) for number, step in enumerate(self.steps)],
        ]
        return "\n".join(lines)


DTYPES = (torch.float32, torch.float64)
