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
from dataclasses import replace
from pathlib import Path

import pytest
from engine import TORCH, ours
from form import by_form
from fuzz.compare import bound_of, run_program, run_programs
from fuzz.faults import FAULTS, broken
from fuzz.generator import program_of
from fuzz.machine import Meshes
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
def watched(path: Path, limit: float = LIMIT) -> Iterator[Callable[[Program], None]]:
    """Gives what is to be called before each program. Past the limit for one, this process ends, with the program and
    the stacks of its threads in the file."""
    timers: list[threading.Timer] = []

    def give_up(text: str) -> None:
        with path.open("w") as file:
            print(f"did not end within {limit:g} s:\n{text}", file=file, flush=True)
            faulthandler.dump_traceback(file)
        os._exit(1)

    def begin(program: Program) -> None:
        for timer in timers:
            timer.cancel()
        timers[:] = [threading.Timer(limit, give_up, [program.text()])]
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


def hanging(rank: int, world_size: int, first: int, number: int, folder: str) -> list[str]:
    with watched(Path(folder) / f"rank {rank}", limit=0.1) as begin:
        begin(program_of(first, world_size))
        threading.Event().wait()
    return []


def check_programs(world_size: int, first: int, number: int, run: Callable[..., list[str]] = programs) -> None:
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        try:
            arguments = (world_size, first, number, folder)
            found = run_ranks(world_size, run, *arguments, timeout=LIMIT * (number + 1))
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


def loose_programs(world_size: int) -> list[Program]:
    """One with 16 bits and one without that are not compared to the bit, with sharded units and microbatches."""
    chosen: dict[float, list[Program]] = {}
    for seed in range(1, 200):
        program = program_of(seed, world_size)
        has_all = all(unit.api == "fully_shard" for unit in program.units) and program.mesh == (world_size,)
        parts = [len(step.microbatches) for step in program.steps if not step.microbatches[-1].module]
        if not program.is_exact and has_all and max(parts, default=1) > 1:
            chosen.setdefault(bound_of(program), []).append(program)
    return [programs[0] for programs in chosen.values()]


def faults_are_noticed(rank: int) -> None:
    meshes = Meshes()
    programs = loose_programs(2)
    assert len(programs) == 2
    for program in programs:
        for fault in FAULTS:
            # By the values alone.
            program = replace(program, sums_are_counted=False, gathers_are_counted=False)
            found = run_program(program, [broken(ours(), fault), TORCH], rank, meshes)
            assert ": gradient of" in found, f"{fault.__name__}: {found or 'nothing'}\n{program.text()}"


class TestFaults:
    def test_are_noticed(self) -> None:
        run_ranks(2, faults_are_noticed, timeout=600)


class TestWatch:
    def test_a_hang_shows_the_program(self) -> None:
        with pytest.raises(AssertionError, match="program 3 on 2 ranks"):
            check_programs(2, 3, 1, hanging)


class TestGenerator:
    def test_programs_have_what_they_should(self) -> None:
        """So that no kind of thing is lost by a change of the generator."""
        texts = [program_of(seed, world_size).text() for seed in range(1, 151) for world_size in (2, 4)]
        for wanted in (
            "replicate(", "fully_shard([", "replicate([", "reshard_after_forward=None", "reshard_after_forward=True",
            "reshard_after_forward=False", "reshard_after_forward=2", "tied_to", "has_spare", "is_checkpointed",
            "optional", "dtype=torch.float64", "param_dtype=torch.bfloat16", "reduce_dtype=torch.float32",
            "output_dtype=torch.float32", "cast_forward_inputs=False", "ignored=", "CPUOffloadPolicy", "last dimension",
            "requires_grad_(True)", "requires_grad_(False)", "set_requires_gradient_sync(False)", "recurse=False",
            "set_requires_all_reduce(False)", "set_is_last_backward(False)", "set_reshard_after_backward(False)",
            "set_reshard_after_forward(", "unshard(async_op=True)", "unshard(async_op=False)", "reshard()",
            "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "2 forward of model",
            "inputs require gradients", "under no_grad", "set_to_none=False", "mesh (2, 2)", "mesh (1, 2)", "opaque ->",
            "skips", "keywords ->", "-> namedtuple", "-> dataclass", "nested ->", "1 forward of c",
        ):  # fmt: skip
            assert sum(wanted in text for text in texts) >= 3, wanted
        assert program_of(5, 2).text() == program_of(5, 2).text()
