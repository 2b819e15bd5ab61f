"""The suite `pipeline`: for which share of a step the ranks of a pipeline wait, beside what its schedule predicts.

Two ranks have stages that cost the same. The schedule's table takes a backward for twice a forward, each half of it for
as long as a forward, and what travels for nothing.
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

SCHEDULES = ("gpipe", "one_forward_one_backward", "interleaved", "interleaved_zero_bubble", "zero_bubble_v")
#: Of the picture.
DRAWN = "zero_bubble_v"


@dataclass(frozen=True)
class Extent:
    width: int
    rows: int
    microbatches: int
    rounds: int
    steps: int


#: Large enough that a message, which may wait for a turn of a busy core, takes little beside a stage.
SHORT = Extent(1024, 192, 8, 1, 3)
FULL = Extent(1024, 192, 8, 3, 7)


def command(build: Path, extent: Extent, store: Path) -> list[str]:
    program = str(build / "benchmarks" / "cpp" / "pipeline_steps")
    shape = {"--width": extent.width, "--rows": extent.rows, "--microbatches": extent.microbatches}
    return [program, "--world", "2", "--store", str(store), *(str(word) for pair in shape.items() for word in pair)]


def figures(build: Path, extent: Extent) -> Iterator[Figure]:
    with started(lambda _, store: command(build, extent, store), ["the suite pipeline"], 2) as (program,):
        # All take turns, so that what slows the machine down slows all.
        waits: dict[str, list[float]] = {name: [] for name in SCHEDULES}
        predicted = {}
        for _ in range(extent.rounds):
            for name in SCHEDULES:
                answers = program.ask(f"{name} {extent.steps}")
                predicted[name] = statistics.mean(answer["predicted"] for answer in answers)
                waits[name] += [
                    statistics.mean(step) for step in zip(*(answer["waits"] for answer in answers), strict=True)
                ]
    for name in SCHEDULES:
        note = f"predicted {100 * predicted[name]:.3g} %; {extent.microbatches} microbatches, 2 ranks"
        yield Figure("pipeline", f"{name}: a rank waits", 100 * statistics.median(waits[name]), "% of a step", note)


def draw(build: Path, extent: Extent, picture: Path) -> None:
    """The timeline of a step."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        words = command(build, extent, Path(folder) / "store")
        program = Program.start("pipeline", words, 2, environment={"SHARDWISE_RECORD": folder})
        try:
            program.answers()
            program.ask(f"{DRAWN} 2")
        finally:
            program.end()
        words = [sys.executable, "-m", "shardwise", "timeline", folder, "--out", str(picture), "--last", "1"]
        subprocess.run(words, check=True, capture_output=True)
