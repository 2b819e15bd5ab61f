"""The suite `memory`: what tensors of a rank take in a step, against the formula, and the resident set of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Figure

HERE = Path(__file__).resolve().parent
WORLD = 2

CPP = ("fully_shard", "fully_shard_keep", "fully_shard_flat", "fully_shard_bfloat16", "replicate", "replicate_bfloat16")
PYTHON = ("fully_shard", "fully_shard_keep", "replicate", "fsdp2", "fsdp2_keep", "torch_replicate", "ddp")
ALL = (*(f"C++ {wrap}" for wrap in CPP), *(f"Python {wrap}" for wrap in PYTHON))
#: Of a larger model.
RESIDENT = ("C++ fully_shard", "C++ replicate", "Python fully_shard", "Python replicate", "Python fsdp2", "Python ddp")
NAMES = {
    "Python ddp": "DDP",
    "Python fsdp2": "FSDP2",
    "Python fsdp2_keep": "FSDP2 kept",
    "Python torch_replicate": "torch's replicate",
}
PEAKS = {"forward_peak": "the most in forward", "backward_peak": "the most in backward", "after_step": "after a step"}


@dataclass(frozen=True)
class Size:
    """Of the example's GPT."""

    layers: int
    width: int


SHORT = (Size(4, 192), Size(4, 192))
#: 10.9 million parameters for the allocator, 106 million for the resident set.
FULL = (Size(6, 384), Size(15, 768))


def command(build: Path, name: str, size: Size) -> list[str]:
    language, wrap = name.split()
    program = [str(build / "benchmarks" / "cpp" / "memory_steps")]
    if language == "Python":
        program = [sys.executable, str(HERE / "python" / "memory_steps.py")]
    words = ["--wrap", wrap, "--layers", str(size.layers), "--width", str(size.width), "--world", str(WORLD)]
    return [*program, *words]


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    # A resident set also counts what a rank reads of others through shared memory.
    environment = {"SHARDWISE_SHARED_MEMORY": "off", **os.environ}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def answer(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    said, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"bench: {name} ended with {process.returncode}:\n{errors}")
    return dict(json.loads(said.splitlines()[-1]))


def measure(build: Path, name: str, size: Size) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        words = [*command(build, name, size), "--store", f"{folder}/store"]
        ranks = [start([*words, "--rank", str(rank)]) for rank in range(WORLD)]
        try:
            return [answer(name, rank) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def allocator_figures(build: Path, size: Size, names: Sequence[str] = ALL) -> Iterator[Figure]:
    for name in names:
        found = measure(build, name, size)[0]
        whole = found["parameter_bytes"]
        label = NAMES.get(name, name)
        for key, words in PEAKS.items():
            note = f"{found[key] / 2**20:.1f} MiB"
            if "estimate" in found:
                note += f", {found[key] / found['estimate'][key]:.4f} x the formula's"
            yield Figure("memory", f"{label}: {words}", found[key] / whole, "P", note)
        note = f"{found['buffers']} of them by the engine" if "buffers" in found else ""
        yield Figure("memory", f"{label}: allocations in forward and backward", found["allocations"], "a step", note)


def resident_figures(build: Path, size: Size, names: Sequence[str] = RESIDENT) -> Iterator[Figure]:
    ddp = None
    # DDP first: the others are compared with it.
    for name in sorted(names, key=lambda each: each != "Python ddp"):
        ranks = measure(build, name, size)
        resident = max(rank["resident_mib"] for rank in ranks)
        millions = ranks[0]["parameter_bytes"] / 4e6
        ddp = resident if name == "Python ddp" else ddp
        note = f"{resident / ddp:.3f} x DDP" if ddp else ""
        words = f"{NAMES.get(name, name)}: resident set, {millions:.1f} M parameters, {WORLD} ranks"
        yield Figure("memory", words, resident, "MiB", note)
