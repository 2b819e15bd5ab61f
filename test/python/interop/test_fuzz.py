"""Random programs: torch's engine and ours must show the same.

SHARDWISE_FUZZ_PROGRAMS is how many, SHARDWISE_FUZZ_SEED the first seed.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
#: Seconds for one program, which takes about one: a rank that needs more hangs.
LIMIT = 120.0


@contextmanager
def watched(path: Path) -> Iterator[Callable[[Program], None]]:
    """Gives what is to be called before each program. Past the limit for one, this process ends, with the program and
    the stacks of its threads in the file."""
    timers: list[threading.Timer] = []

    def give_up(text: str) -> None:
        with path.open("w") as file:
            print(f"did not end within {LIMIT:g} s:\n{text}", file=file, flush=True)
            faulthandler.dump_traceback(file)
        os._exit(1)

    def begin(program: Program) -> None:
        for timer in timers:
            timer.cancel()
        timers[:] = [threading.Timer(LIMIT, give_up, [program.text()])]
        timers[0].daemon = True
        timers[0].start()

    yield begin
    for timer in timers:
        timer.cancel()


def programs(rank: int, world_size: int, first: int, number: int, folder: str) -> list[str]:
    with watched(Path(folder) / f"rank {rank}") as begin:
        return run_programs(rank, world_size, range(first, first + number), [ours(), TORCH], begin)


def number_of(world_size: int) -> int:
    return by_form(PROGRAMS, PROGRAMS * (3 if world_size == 2 else 2) // 5)


def check_programs(world_size: int, first: int, number: int) -> None:
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        try:
            arguments = (world_size, first, number, folder)
            found = run_ranks(world_size, programs, *arguments, timeout=LIMIT * (number + 1))
        except RankFailure as error:
            hung = [f"{path.name} {path.read_text()}" for path in sorted(Path(folder).iterdir())]
            raise AssertionError("\n\n".join([*hung, str(error)])) from error
    problems = [problem for each in found for problem in each]
    assert not problems, "\n\n".join(problems[:3])


class TestPrograms:
    @pytest.mark.parametrize("world_size", by_form([2], [2, 4]))
    def test_programs(self, world_size: int) -> None:
        last = FIRST + number_of(world_size)
        for first in range(FIRST, last, TOGETHER):
            check_programs(world_size, first, min(TOGETHER, last - first))
