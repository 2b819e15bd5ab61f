"""The suite `overlap`: how much of what travels hides behind what is computed, over a wire that is modelled, and how
long estimate_time() says that a step takes over that wire.

The wire is a link of one rank that is as slow as told (benchmarks/cpp/wire.h): the collectives are real, their
ends are late. One rank's step is compared with the same step over the wire that there is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from figures import Figure
from turns import Program, started

WRAPS = ("fully_shard", "fully_shard_keep", "replicate")
LATENCY = 50  # microseconds


@dataclass(frozen=True)
class Extent:
    layers: int
    width: int
    #: How long the wire is busy in a step, as a share of the step without it.
    shares: tuple[float, ...]
    rounds: int
    steps: int
    world: int = 2


SHORT = Extent(4, 192, (0.5,), 3, 4)
FULL = Extent(8, 384, (0.25, 0.5, 1.0), 7, 4)
#: Beside the estimate only.
MORE_RANKS = (Extent(4, 192, (0.5, 1.0), 3, 4, world=4), Extent(4, 192, (0.5, 1.0), 3, 4, world=8))


@dataclass(frozen=True)
class Speed:
    """Of the wire; 0: no slower than the wire that there is."""

    megabytes: float = 0.0
    prefetches: bool = True

    def order(self, steps: int) -> str:
        return f"{steps} {LATENCY if self.megabytes else 0} {self.megabytes} {int(self.prefetches)}"


@dataclass(frozen=True)
class Took:
    seconds: float
    #: The wire, in a step.
    busy: float


def command(build: Path, wrap: str, extent: Extent, store: str) -> list[str]:
    words = ["--wrap", wrap, "--world", str(extent.world), "--store", store]
    words += ["--layers", str(extent.layers), "--width", str(extent.width)]
    return [str(build / "benchmarks" / "cpp" / "overlap"), *words]


def ask(program: Program, speed: Speed, steps: int) -> Took:
    answers = program.ask(speed.order(steps))
    seconds = statistics.median(max(step) for step in zip(*(each["seconds"] for each in answers), strict=True))
    return Took(seconds, answers[0]["busy_seconds"])


def estimated(program: Program, speed: Speed, without: float) -> float:
    return float(program.ask(f"estimate {without} {LATENCY} {speed.megabytes}")[0]["step"])


def suite(build: Path, quick: bool) -> Iterator[Figure]:
    for extent in (SHORT,) if quick else (FULL, *MORE_RANKS):
        yield from figures(build, extent)


def figures(build: Path, extent: Extent) -> Iterator[Figure]:
    def words(name: str, store: Path) -> list[str]:
        return command(build, name.split()[1], extent, str(store))

    for wrap in WRAPS:
        with started(words, [f"overlap {wrap}"], extent.world) as (program,):
            yield from of_wrap(program, wrap, extent)


def of_wrap(program: Program, wrap: str, extent: Extent) -> Iterator[Figure]:
    answer = program.ask(Speed().order(3))[0]
    plain = statistics.median(answer["seconds"])
    has_shares = extent.world == 2
    for share in extent.shares:
        megabytes = answer["bytes"] / 1e6 / (share * plain)
        # What is gathered ahead does not matter where nothing is gathered.
        speeds = [Speed(megabytes), *([Speed(megabytes, False)] if wrap == "fully_shard" and has_shares else [])]
        hidden: dict[Speed, list[float]] = {speed: [] for speed in speeds}
        beside_estimate = []
        busy = 0.0
        for _ in range(extent.rounds):
            # One after the other, so that what slows the machine down slows both.
            without = ask(program, Speed(), extent.steps)
            for speed in speeds:
                took = ask(program, speed, extent.steps)
                busy = took.busy
                hidden[speed].append(1 - (took.seconds - without.seconds) / took.busy)
                if speed.prefetches:
                    beside_estimate.append(took.seconds / estimated(program, speed, without.seconds))
        for speed in speeds if has_shares else ():
            name = f"{wrap}{'' if speed.prefetches else ', nothing gathered ahead'}: hidden, wire busy {share:.0%}"
            note = f"of {1e3 * busy:.3g} ms on the wire in a step; without it {1e3 * plain:.3g} ms"
            yield Figure("overlap", name, 100 * statistics.median(hidden[speed]), "%", note)
        name = f"{wrap}: step, {extent.world} ranks, wire busy {share:.0%}"
        yield Figure("overlap", name, statistics.median(beside_estimate), "x estimate_time()", "")


def draw(build: Path, extent: Extent, picture: Path) -> None:
    """The timeline of two steps of fully_shard, of the engine's own events, over the slowest wire."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        words = command(build, "fully_shard", extent, f"{folder}/store")
        program = Program.start("overlap", words, 2, environment={"SHARDWISE_RECORD": folder})
        try:
            program.answers()
            answer = program.ask(Speed().order(3))[0]
            seconds = extent.shares[-1] * statistics.median(answer["seconds"])
            program.ask(Speed(answer["bytes"] / 1e6 / seconds).order(3))
        finally:
            program.end()
        words = [sys.executable, "-m", "shardwise", "timeline", folder, "--out", str(picture), "--last", "2"]
        subprocess.run(words, check=True, capture_output=True)
