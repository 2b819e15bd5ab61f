"""The suite `checkpoint`: saving and loading a model with its AdamW, beside torch's DCP and beside a plain write."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from figures import Figure

HERE = Path(__file__).resolve().parent
SUITE = "checkpoint"


@dataclass(frozen=True)
class Extent:
    layers: int
    rounds: int
    world: int = 2


SHORT = Extent(layers=4, rounds=1)
#: 1.2 GB of parameters and moments.
FULL = Extent(layers=96, rounds=5)


def suite(extent: Extent, folder: str | None = None) -> Iterator[Figure]:
    """`folder` is on the disk to measure: by default that of temporary files."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        words = [place, "--layers", extent.layers, "--rounds", extent.rounds, "--world", extent.world]
        command = [sys.executable, str(HERE / "python" / "checkpoints.py"), *map(str, words)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    yield from figures(found["bytes"], found["seconds"], found["memory"])


def figures(size: int, seconds: dict[str, list[float]], memory: dict[str, float]) -> Iterator[Figure]:
    def speed(name: str) -> float:
        return size / statistics.median(seconds[name]) / 1e9

    def ratio(one: str, other: str) -> float:
        """Of the same turns, so that what changes from turn to turn does not count."""
        return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))

    yield Figure(SUITE, "a plain write of the same bytes, with fsync", speed("plain"), "GB/s")
    note = f"{ratio('plain', 'shardwise'):.2f} x a plain write, {ratio('dcp', 'shardwise'):.2f} x DCP"
    yield Figure(SUITE, "shardwise: save", speed("shardwise"), "GB/s", note)
    yield Figure(SUITE, "DCP: save", speed("dcp"), "GB/s")
    yield Figure(SUITE, "a copy of the same bytes in memory", 1e3 * statistics.median(seconds["copy"]), "ms")
    note = f"{ratio('shardwise stall', 'copy'):.2f} x a copy, {ratio('shardwise stall', 'dcp stall'):.2f} x DCP"
    stall = 1e3 * statistics.median(seconds["shardwise stall"])
    yield Figure(SUITE, "shardwise: what AsyncSaver.save() keeps a step waiting", stall, "ms", note)
    stall = 1e3 * statistics.median(seconds["dcp stall"])
    yield Figure(SUITE, "DCP: what async_save() keeps a step waiting", stall, "ms")
    yield Figure(
        SUITE, "shardwise: load", speed("shardwise load"), "GB/s", f"{ratio('dcp load', 'shardwise load'):.2f} x DCP"
    )
    yield Figure(SUITE, "DCP: load", speed("dcp load"), "GB/s")
    names = {"": "save", " stall": "save in the background", " load": "load"}
    for (key, what), own in product(names.items(), ("shardwise", "DCP")):
        yield Figure(SUITE, f"{own}: memory of a rank for a {what}", memory[f"{own.lower()}{key}"], "MiB")
