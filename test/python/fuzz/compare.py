"""Runs programs with two engines side by side and tells where they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuzz.generator import program_of
from fuzz.machine import Machine, Note
from fuzz.program import Program


class Comparison:
    """Of what two engines show of one program, on one rank."""

    def __init__(self, program: Program, theirs: list[Note]) -> None:
        self.program = program
        self.bound = 0.0 if program.is_exact else bound_of(program)
        #: The largest value of each kind at each moment; of losses, which are differences, at any.
        self.sizes: dict[tuple[str, str], float] = {}
        for note in theirs:
            if isinstance(note.value, torch.Tensor) and note.value.numel():
                key = self._key(note)
                self.sizes[key] = max(self.sizes.get(key, 0.0), float(note.value.abs().max()))

    @staticmethod
    def _key(note: Note) -> tuple[str, str]:
        return note.kind, "" if note.kind == "loss" else note.moment

    def difference(self, ours: Note, theirs: Note) -> str:
        """Empty where there is none."""
        if ours.what != theirs.what:
            return f"{ours.what} for {theirs.what}"
        if ours.kind == "sums" and not self.program.sums_are_counted:
            return ""
        if ours.kind == "gathers" and not self.program.gathers_are_counted:
            return ""
        return "" if self._same(ours, theirs) else f"{ours.what}: {ours.value} for {theirs.value}"

    def _same(self, ours: Note, theirs: Note) -> bool:
        a, b = ours.value, theirs.value
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return a is b or (isinstance(a, str) and a == b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if torch.equal(a, b):
            return True
        return float((a - b).abs().max()) <= self.bound * self.sizes[self._key(theirs)]


def bound_of(program: Program) -> float:
    """How far apart results may be that were rounded in another order: some units of the last place of the coarsest
    dtype."""
    has_16_bits = any(unit.policy.get("param_dtype") or unit.policy.get("reduce_dtype") for unit in program.units)
    return 8 * torch.finfo(torch.bfloat16).eps if has_16_bits else 128 * torch.finfo(torch.float32).eps


def run_program(program: Program, engines: list[Any], rank: int) -> str:
    """Empty, or what differs first, with the program. An error of an engine comes with the program too. The second
    engine goes first, and what is not compared to the bit follows it."""

    def notes_of(engine: Any, pilot: list[Note] | None = None) -> list[Note]:
        try:
            return Machine(program, engine, rank, pilot).run()
        except Exception as error:
            raise RuntimeError(f"{engine.name}, rank {rank}: {error}\n{program.text()}") from error

    theirs = notes_of(engines[1])
    ours = notes_of(engines[0], None if program.is_exact else theirs)
    comparison = Comparison(program, theirs)
    for a, b in zip(ours, theirs, strict=True):
        if found := comparison.difference(a, b):
            return f"rank {rank}: {found}\n{program.text()}"
    return ""


def run_programs(
    rank: int, world_size: int, seeds: range, engines: list[Any], begin: Callable[[Program], Any]
) -> list[str]:
    """What is different, of three programs at most. `begin` is called before each."""
    found: list[str] = []
    for seed in seeds:
        program = program_of(seed, world_size)
        begin(program)
        if problem := run_program(program, engines, rank):
            found.append(problem)
    return found[:3]
