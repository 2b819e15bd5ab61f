"""The suite `collectives`: all-gathers, reduce-scatters and all-reduces by size, over our transport and over Gloo."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from figures import Figure

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Extent:
    worlds: tuple[int, ...]
    sizes: tuple[int, ...]
    rounds: int


SHORT = Extent((2, 4), (4 << 10, 256 << 10, 4 << 20), 9)
FULL = Extent((2, 4, 8), tuple(4 << 10 << 2 * step for step in range(8)), 15)


def figures(build: Path, extent: Extent) -> Iterator[Figure]:
    for world in extent.worlds:
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            ranks = [start(build, rank, world, Path(folder) / "store") for rank in range(world)]
            try:
                answers(ranks)
                for operation in OPERATIONS:
                    for size in extent.sizes:
                        yield compare(ranks, operation, size, extent.rounds)
            finally:
                for rank in ranks:
                    end(rank)


def start(build: Path, rank: int, world: int, store: Path) -> subprocess.Popen[str]:
    command = [str(build / "benchmarks" / "cpp" / "collectives"), "--rank", str(rank), "--world", str(world)]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, "--store", str(store)], stdin=pipe, stdout=pipe, text=True)


def end(rank: subprocess.Popen[str]) -> None:
    assert rank.stdin
    rank.stdin.close()
    try:
        rank.wait(timeout=30)
    except subprocess.TimeoutExpired:
        rank.kill()
        rank.wait()


def answers(ranks: list[subprocess.Popen[str]]) -> list[dict[str, list[float]]]:
    lines = [rank.stdout.readline() for rank in ranks if rank.stdout]
    if not all(lines):
        raise RuntimeError("bench: a rank of the suite collectives ended early; its own error is above.")
    return [json.loads(line) for line in lines]


def compare(ranks: list[subprocess.Popen[str]], operation: str, size: int, rounds: int) -> Figure:
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write(f"{operation} {size} {rounds if size < 16 << 20 else max(rounds // 3, 3)}\n")
        rank.stdin.flush()
    answer = answers(ranks)
    # A collective is over when its slowest rank is done.
    ours, gloo = (
        statistics.median(max(each) for each in zip(*(rank[name] for rank in answer), strict=True))
        for name in ("direct", "gloo")
    )
    text = f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} kB"
    note = f"{1e3 * ours:.3g} ms, Gloo {1e3 * gloo:.3g} ms"
    return Figure("collectives", f"{operation} of {text}, {len(ranks)} ranks", ours / gloo, "x Gloo", note)
