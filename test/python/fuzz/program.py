"""A program: a model, its units, and what is done with them. Its text is enough to write it by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pprint import pformat
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


@dataclass
class Step:
    orders: dict[str, list[int]]
    microbatches: list[Microbatch]
    #: By name: whether it requires a gradient from now on.
    freezes: dict[str, bool]
    set_to_none: bool
    evaluates: bool


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
        again = f"SHARDWISE_FUZZ_SEED={self.seed} SHARDWISE_FUZZ_PROGRAMS=1 python -m pytest {name}"
        return f"again: {again}\n{pformat(self, width=120, sort_dicts=False)}"


DTYPES = (torch.float32, torch.float64)
