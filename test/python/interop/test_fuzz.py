"""Random programs: torch's engine and ours must show the same.

SHARDWISE_FUZZ_PROGRAMS is how many, SHARDWISE_FUZZ_SEED the first seed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from engine import TORCH, ours
from form import by_form
from fuzz.compare import run_programs
from fuzz.program import Program
from pool import run_ranks

from shardwise.testing import RankFailure

PROGRAMS = int(os.environ.get("SHARDWISE_FUZZ_PROGRAMS") or by_form(6, 300))
FIRST = int(os.environ.get("SHARDWISE_FUZZ_SEED", "1"))
#: Programs of one set of processes.
TOGETHER = 50
#: Seconds beside the few that a program takes: ranks that need more hang.
LIMIT = 120.0


def programs(rank: int, world_size: int, first: int, number: int, folder: str) -> list[str]:
    def begin(program: Program) -> None:
        (Path(folder) / f"rank {rank}").write_text(program.text())

    return run_programs(rank, world_size, range(first, first + number), [ours(), TORCH], begin)


def number_of(world_size: int) -> int:
    return by_form(PROGRAMS, PROGRAMS * (3 if world_size == 2 else 2) // 5)


def check_programs(world_size: int, first: int, number: int) -> None:
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        try:
            found = run_ranks(world_size, programs, world_size, first, number, folder, timeout=LIMIT + 5 * number)
        except (RankFailure, TimeoutError) as error:
            last = [f"{path.name} ran:\n{path.read_text()}" for path in sorted(Path(folder).iterdir())]
            raise AssertionError("\n\n".join([*last, str(error)])) from error
    problems = [problem for each in found for problem in each]
    assert not problems, "\n\n".join(problems[:3])


class TestPrograms:
    @pytest.mark.parametrize("world_size", by_form([2], [2, 4]))
    def test_programs(self, world_size: int) -> None:
        last = FIRST + number_of(world_size)
        for first in range(FIRST, last, TOGETHER):
            check_programs(world_size, first, min(TOGETHER, last - first))
