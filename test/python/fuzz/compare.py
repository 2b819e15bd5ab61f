"""Runs programs with two engines side by side and tells where they differ."""

from __future__ import annotations

from typing import Any

import torch

from fuzz.generator import program_of
from fuzz.machine import Machine, Meshes, Note
from fuzz.program import Program


def difference(ours: Note, theirs: Note, program: Program) -> str:
    """Empty where there is none."""
    if ours.what != theirs.what:
        return f"{ours.what} for {theirs.what}"
    if ours.is_count and not program.is_counted:
        return ""
    a, b = ours.value, theirs.value
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        same = (a is None) == (b is None) and (isinstance(a, torch.Tensor) or a == b)
    elif a.shape != b.shape or a.dtype != b.dtype:
        same = False
    else:
        same = torch.equal(a, b) or (not program.is_exact and near(a, b, program))
    return "" if same else f"{ours.what}: {a} for {b}"


def near(a: torch.Tensor, b: torch.Tensor, program: Program) -> bool:
    has_16_bits = any(unit.policy.get("param_dtype") or unit.policy.get("reduce_dtype") for unit in program.units)
    bound = 5e-2 if has_16_bits else 2e-5
    return bool((a - b).double().norm() <= bound * b.double().norm() + bound * 1e-2)


def run_program(program: Program, engines: list[Any], rank: int, meshes: Meshes) -> str:
    """Empty, or what differs first, with the program. An error of an engine comes with the program too."""
    notes = []
    for engine in engines:
        try:
            notes.append(Machine(program, engine, rank, meshes).run())
        except Exception as error:
            raise RuntimeError(f"{engine.name}, rank {rank}: {error}\n{program.text()}") from error
    ours, theirs = notes
    for a, b in zip(ours, theirs, strict=True):
        if found := difference(a, b, program):
            return f"rank {rank}: {found}\n{program.text()}"
    return ""


def run_programs(rank: int, world_size: int, seeds: range, engines: list[Any]) -> list[str]:
    """What is different, of three programs at most."""
    meshes = Meshes()
    found: list[str] = []
    for seed in seeds:
        if problem := run_program(program_of(seed, world_size), engines, rank, meshes):
            found.append(problem)
    return found[:3]
