"""The suite `collectives`: all-gathers, reduce-scatters and all-reduces by size, over our transport and over Gloo."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from figures import Figure
from turns import Program, started

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Extent:
    worlds: tuple[int, ...]
    sizes: tuple[int, ...]
    rounds: int


SHORT = Extent((2, 4), (4 << 10, 256 << 10, 4 << 20), 9)
FULL = Extent((2, 4, 8), tuple(4 << 10 << 2 * step for step in range(9)), 15)


def figures(build: Path, extent: Extent) -> Iterator[Figure]:
    for world in extent.worlds:

        def words(_: str, store: Path, world: int = world) -> list[str]:
            program = str(build / "benchmarks" / "cpp" / "collectives")
            return [program, "--world", str(world), "--store", str(store)]

        with started(words, ["the suite collectives"], world) as (program,):
            for operation in OPERATIONS:
                for size in extent.sizes:
                    yield compare(program, operation, size, extent.rounds)


def compare(program: Program, operation: str, size: int, rounds: int) -> Figure:
    answer = program.ask(f"{operation} {size} {rounds if size < 16 << 20 else max(rounds // 3, 3)}")
    # A collective is over when its slowest rank is done.
    ours, gloo = (
        statistics.median(max(each) for each in zip(*(rank[name] for rank in answer), strict=True))
        for name in ("direct", "gloo")
    )
    text = f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} kB"
    note = f"{1e3 * ours:.3g} ms, Gloo {1e3 * gloo:.3g} ms"
    return Figure("collectives", f"{operation} of {text}, {len(program.ranks)} ranks", ours / gloo, "x Gloo", note)
