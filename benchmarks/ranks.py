"""The suite `ranks`: whole steps of two ranks over Gloo, every wrapping in turn, many times over."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Figure

HERE = Path(__file__).resolve().parent
WORLD = 2

CPP = ("none", "fully_shard", "fully_shard_keep", "fully_shard_flat", "replicate")
PYTHON = ("none", "ddp", "fsdp2", "fsdp2_keep", "torch_replicate", "replicate")
NAMES = {
    "Python ddp": "DDP",
    "Python fsdp2": "FSDP2",
    "Python fsdp2_keep": "FSDP2 kept",
    "Python torch_replicate": "torch's replicate",
}
COUNTED = {
    "all_gathers": "all-gathers",
    "reduce_scatters": "reduce-scatters",
    "all_reduces": "all-reduces",
    "allocations": "buffers allocated",
}
COPIED = {
    "collective_bytes": "bytes handed to collectives",
    "gradient_copy_bytes": "bytes of gradients copied",
    "parameter_copy_bytes": "bytes of parameters copied",
}


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    rounds: int
    steps: int


@dataclass
class Wrapping:
    """The ranks of one wrapping, each a process that waits until it is told to run a few steps."""

    name: str
    ranks: list[subprocess.Popen[str]]
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, build: Path, size: Size, folder: Path) -> Wrapping:
        language, wrap = name.split()
        command = [str(build / "benchmarks" / "cpp" / "rank_steps")]
        if language == "Python":
            command = [sys.executable, str(HERE / "python" / "rank_steps.py")]
        store = folder / name.replace(" ", "-")
        command += ["--wrap", wrap, "--world", str(WORLD), "--store", str(store)]
        command += ["--layers", str(size.layers), "--width", str(size.width)]
        pipe = subprocess.PIPE
        return cls(
            name,
            [
                subprocess.Popen([*command, "--rank", str(rank)], stdin=pipe, stdout=pipe, text=True)
                for rank in range(WORLD)
            ],
        )

    def answers(self) -> list[dict[str, Any]]:
        lines = [rank.stdout.readline() for rank in self.ranks if rank.stdout]
        if not all(lines):
            raise RuntimeError(f"bench: a rank of {self.name} ended early; its own error is above.")
        return [json.loads(line) for line in lines]

    def ask(self, what: str) -> list[dict[str, Any]]:
        for rank in self.ranks:
            assert rank.stdin
            rank.stdin.write(f"{what}\n")
            rank.stdin.flush()
        return self.answers()

    def end(self) -> None:
        for rank in self.ranks:
            assert rank.stdin
            rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(timeout=60)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()

    def median(self, key: str) -> float:
        """Milliseconds of a step, of rank 0."""
        return 1e3 * statistics.median(float(value) for answers in self.rounds for value in answers[0][key])

    def last(self, key: str) -> float:
        """A step's share of the last round."""
        answer = self.rounds[-1][0]
        return float(answer[key]) / len(answer["seconds"])

    def once(self, key: str) -> float:
        return max(float(answer[key]) for answers in self.rounds for answer in answers)


ALL = (*(f"C++ {wrap}" for wrap in CPP), *(f"Python {wrap}" for wrap in PYTHON))


def measure(build: Path, size: Size, names: Sequence[str] = ALL) -> list[Wrapping]:
    wrappings: list[Wrapping] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        try:
            # One after the other: to start takes all cores.
            for name in names:
                wrappings.append(Wrapping.start(name, build, size, Path(folder)))
                wrappings[-1].answers()
            for wrapping in wrappings:
                wrapping.ask("3")
            for turn in range(size.rounds):
                shift = turn % len(wrappings)
                for wrapping in wrappings[shift:] + wrappings[:shift]:
                    wrapping.rounds.append(wrapping.ask(str(size.steps)))
            for wrapping in wrappings:
                if wrapping.name.startswith("Python"):
                    wrapping.collectives = wrapping.ask("count")[0]
        finally:
            for wrapping in wrappings:
                wrapping.end()
    return wrappings


def figures(wrappings: list[Wrapping]) -> Iterator[Figure]:
    by_name = {wrapping.name: wrapping for wrapping in wrappings}
    ddp = by_name["Python ddp"]
    parameters = ddp.once("parameter_bytes")
    yield Figure("ranks", "parameters", parameters / 2**20, "MiB", "P below")
    for name, wrapping in by_name.items():
        label = NAMES.get(name, name)
        wall, cpu = wrapping.median("seconds"), wrapping.median("cpu_seconds")
        beside = [f"{wall:.0f} ms"]
        rival = "Python torch_replicate" if name.endswith("replicate") else "Python fsdp2"
        rival = "Python fsdp2_keep" if name.endswith("_keep") else rival
        ours = name.startswith("C++ fully") or name.endswith(" replicate")
        if ours and rival in by_name:
            beside.append(f"{wall / by_name[rival].median('seconds'):.2f} x {NAMES[rival]}")
        yield Figure("ranks", f"{label}: step", wall / ddp.median("seconds"), "x DDP", ", ".join(beside))
        yield Figure("ranks", f"{label}: CPU time", cpu / ddp.median("cpu_seconds"), "x DDP", f"{cpu:.0f} ms a rank")
    for name, wrapping in by_name.items():
        label = NAMES.get(name, name)
        peak, between = wrapping.once("tensor_peak_bytes"), wrapping.once("tensor_bytes")
        yield Figure("ranks", f"{label}: tensors at the peak", peak / parameters, "P", f"{peak / 2**20:.0f} MiB")
        yield Figure("ranks", f"{label}: tensors between steps", between / parameters, "P", "gradients are there")
        resident = wrapping.once("resident_peak_mib") - wrapping.once("resident_before_mib")
        yield Figure("ranks", f"{label}: resident set at the peak", resident, "MiB", "beyond the start")
    for name, wrapping in by_name.items():
        label = NAMES.get(name, name)
        for key, value in wrapping.collectives.items():
            yield Figure("ranks", f"{label}: {key}", value, "a step")
        if name.startswith("C++") and not name.endswith("none"):
            for key, text in COUNTED.items():
                if wrapping.last(key) or key == "allocations":
                    yield Figure("ranks", f"{label}: {text}", wrapping.last(key), "a step")
            for key, text in COPIED.items():
                yield Figure("ranks", f"{label}: {text}", wrapping.last(key) / parameters, "P a step")
