"""Programs whose ranks are processes that take turns: all are there at the same time, and one runs at a time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

#: All programs keep what they once allocated. Else glibc may give the top of the heap back in a step and clear it anew
#: in the next, or not: that hangs on which block happens to lie last, and costs up to a tenth of a step.
ALLOCATOR = {name: str(4 << 30) for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")}


def sent_bytes(device: str, process: str = "self") -> int:
    """What a network device of this process's host has sent so far, headers included; other programs' too."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{device}:"):
            return int(line.split(":")[1].split()[8])
    return 0


def loopback_bytes() -> int:
    return sent_bytes("lo")


@dataclass
class Program:
    """The ranks of one program. They wait for orders, and answer each with a line of JSON."""

    name: str
    ranks: list[subprocess.Popen[str]]
    #: What each round brought: the answers of all ranks, and the bytes on the wire meanwhile.
    rounds: list[list[Answer]] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    #: What went over the wire so far, other programs' bytes too.
    count_wire: Callable[[], int] = loopback_bytes

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        world: int,
        environment: Mapping[str, str] | None = None,
        before: Callable[[int], Sequence[str]] = lambda rank: (),
    ) -> Program:
        """`before`: what a rank's command begins with."""
        pipe = subprocess.PIPE
        # Peers go over the loopback device too, and what goes there can be counted.
        variables = {"SHARDWISE_SHARED_MEMORY": "off", **ALLOCATOR, **os.environ, **(environment or {})}
        return cls(
            name,
            [
                subprocess.Popen(
                    [*before(rank), *command, "--rank", str(rank)], stdin=pipe, stdout=pipe, text=True, env=variables
                )
                for rank in range(world)
            ],
        )

    def answers(self) -> list[Answer]:
        answers = []
        for rank in self.ranks:
            assert rank.stdout
            line = rank.stdout.readline()
            # Programs may print words of their own.
            while line and not line.startswith("{"):
                line = rank.stdout.readline()
            if not line:
                raise self._ended_early()
            answers.append(json.loads(line))
        return answers

    def _ended_early(self) -> RuntimeError:
        where = "its own error is above, or the machine ran out of memory."
        return RuntimeError(f"bench: a rank of {self.name} ended early: {where}")

    def ask(self, what: str) -> list[Answer]:
        for rank in self.ranks:
            assert rank.stdin
            try:
                rank.stdin.write(f"{what}\n")
                rank.stdin.flush()
            except BrokenPipeError:
                raise self._ended_early() from None
        return self.answers()

    def round(self, steps: int) -> None:
        before = self.count_wire()
        self.rounds.append(self.ask(str(steps)))
        self.wire.append(self.count_wire() - before)

    def end(self) -> None:
        for rank in self.ranks:
            assert rank.stdin
            with suppress(BrokenPipeError):
                rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(timeout=60)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()

    def of_rounds(self, key: str) -> list[float]:
        """The median of each round, over its steps, of the mean of all ranks."""
        return [
            statistics.median(statistics.mean(step) for step in zip(*(answer[key] for answer in answers), strict=True))
            for answers in self.rounds
        ]

    def least(self, key: str) -> float:
        return min(value for answers in self.rounds for value in answers[0][key])

    def last(self, key: str) -> float:
        """A step's share of the last round."""
        answer = self.rounds[-1][0]
        return float(answer[key]) / len(answer["seconds"])

    def most(self, key: str) -> float:
        return max(float(answer[key]) for answers in self.rounds for answer in answers)

    def wire_bytes(self) -> float:
        """A step's, of all ranks: of the quietest round, for others may use the device too."""
        return min(self.wire) / len(self.rounds[0][0]["seconds"])


@contextmanager
def started(
    command: Callable[[str, Path], Sequence[str]],
    names: Sequence[str],
    ranks: int,
    environment: Mapping[str, str] | None = None,
    before: Callable[[int], Sequence[str]] = lambda rank: (),
    count_wire: Callable[[], int] = loopback_bytes,
) -> Iterator[list[Program]]:
    """Programs that wait for orders. `command` takes a name and a file that the ranks of that program share."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-")))
        programs = []
        # To start takes all of a few cores.
        one_by_one = (os.cpu_count() or 1) < 8
        for name in names:
            words = command(name, folder / name.replace(" ", "-"))
            programs.append(Program.start(name, words, ranks, environment, before))
            programs[-1].count_wire = count_wire
            stack.callback(programs[-1].end)
            if one_by_one:
                programs[-1].answers()
        for program in () if one_by_one else programs:
            program.answers()
        yield programs


def take_turns(programs: Sequence[Program], rounds: int, steps: int) -> None:
    """Each round begins with another program."""
    for program in programs:
        program.ask("3")
    for turn in range(rounds):
        shift = turn % len(programs)
        for program in [*programs[shift:], *programs[:shift]]:
            program.round(steps)


def ratio(program: Program, other: Program, key: str) -> float:
    """The median of the rounds' ratios: what slows a round down slows both."""
    pairs = zip(program.of_rounds(key), other.of_rounds(key), strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)
