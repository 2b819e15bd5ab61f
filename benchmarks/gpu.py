"""The suite `gpu`: steps of a GPT on GPUs, over NCCL, and over a wire that is modelled, each wrapping beside DDP.

Without a GPU nothing is measured, and a line says so.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import steps
from figures import Figure
from turns import Program, ratio, started, take_turns

CPP = tuple(name for name in steps.CPP if name != "C++ none")
PYTHON = (*(name for name in steps.PYTHON if not name.endswith("_over_gloo")), *steps.TORCH, *steps.TORCH_COPIES)
#: The least NCCL that can have several ranks on one GPU, where the environment allows it.
NCCL_OF_SEVERAL_RANKS = (2, 30)
ALLOWS_SEVERAL_RANKS = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True)
class Link:
    """Of a rank to the others: a model."""

    world: int
    microseconds: float
    megabytes: float

    def __str__(self) -> str:
        return f"{self.world} modelled ranks, {self.megabytes / 1e3:g} GB/s"


@dataclass(frozen=True)
class Extent:
    size: steps.Size
    batch: int
    length: int
    device: str = "cuda"
    links: tuple[Link, ...] = ()


#: A machine's own links, and a network's.
LINKS = (Link(8, 20, 200_000), Link(64, 50, 40_000), Link(512, 100, 40_000))
SHORT = (Extent(steps.Size(4, 256, 4, world=1, rounds=3, steps=3), 4, 128, links=LINKS[:1]),)
FULL = (
    Extent(steps.Size(8, 512, 8, world=1, rounds=9, steps=5), 8, 512, links=LINKS),
    Extent(steps.Size(15, 768, 12, world=1, rounds=9, steps=5), 8, 512, links=LINKS),
)


@dataclass(frozen=True)
class Gpus:
    """What torch finds here."""

    count: int
    nccl: tuple[int, ...] = ()

    @classmethod
    def found(cls) -> Gpus:
        # In a process of its own: the ranks are to have the devices to themselves.
        code = "import torch; n = torch.cuda.device_count(); print(n, *(torch.cuda.nccl.version() if n else ()))"
        words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        return cls(int(words[0]), tuple(map(int, words[1:])))

    def worlds(self) -> list[int]:
        """One rank, as many as there are GPUs, and two on each where NCCL can and may."""
        worlds = {1, self.count}
        if os.environ.get(ALLOWS_SEVERAL_RANKS) == "1" and self.nccl >= NCCL_OF_SEVERAL_RANKS:
            worlds.add(2 * self.count)
        return sorted(worlds)


def suite(build: Path, extents: Sequence[Extent]) -> Iterator[Figure]:
    gpus = Gpus.found()
    if gpus.count == 0:
        print("gpu  nothing was measured: torch finds no GPU here", flush=True)
        return
    for extent in extents:
        for world in gpus.worlds():
            yield from measured(build, extent, world, (*CPP, *PYTHON))
        for link in extent.links:
            yield from modelled(build, extent, link, PYTHON)


def command(name: str, build: Path, extent: Extent, world: int, store: Path) -> list[str]:
    size = replace(extent.size, world=world)
    words = ["--device", extent.device, "--batch", str(extent.batch), "--length", str(extent.length)]
    return [*steps.command(name, build, size, store, None), *words]


def programs_of(
    build: Path, extent: Extent, world: int, names: Sequence[str], modelled: bool = False
) -> AbstractContextManager[list[Program]]:
    """DDP first; with modelled peers of one rank each."""

    def words(name: str, store: Path) -> list[str]:
        return [*command(name, build, extent, world, store), *(["--modelled"] if modelled else [])]

    return started(words, (steps.DDP, *names), 1 if modelled else world)


def measured(build: Path, extent: Extent, world: int, names: Sequence[str]) -> Iterator[Figure]:
    """Over NCCL."""
    ranks = f"{world} rank{'s' * (world > 1)}"
    with programs_of(build, extent, world, names) as programs:
        take_turns(programs, extent.size.rounds, extent.size.steps)
        yield from turns_figures(programs, ranks)
        for program in programs:
            if program.name.startswith("Python"):
                yield from device_figures(program, ranks)


def modelled(build: Path, extent: Extent, link: Link, names: Sequence[str]) -> Iterator[Figure]:
    """One rank, whose peers and the wire to them are a model."""
    with programs_of(build, extent, link.world, names, modelled=True) as programs:
        for program in programs:
            program.ask(f"speed {link.microseconds} {link.megabytes}")
        take_turns(programs, extent.size.rounds, extent.size.steps)
        yield from link_figures(programs, link)


def link_figures(programs: Sequence[Program], link: Link) -> Iterator[Figure]:
    for program in programs:
        seconds = statistics.median(program.of_rounds("seconds"))
        busy = program.most("busy_seconds")
        note = f"median {1e3 * seconds:.3g} ms, the wire busy for {1e3 * busy:.3g} ms"
        value = ratio(program, programs[0], "seconds")
        yield Figure("gpu", f"{label(program, str(link))}: step", value, "x DDP", note)


def label(program: Program, ranks: str) -> str:
    millions = program.most("parameter_bytes") / 4e6
    return f"{millions:.0f} M, {ranks}: {steps.NAMES.get(program.name, program.name)}"


def turns_figures(programs: Sequence[Program], ranks: str) -> Iterator[Figure]:
    ddp = programs[0]
    texts = {"seconds": "step", "host_seconds": "host, until all is given to the device"}
    for program in programs:
        for key, text in texts.items():
            note = f"median {1e3 * statistics.median(program.of_rounds(key)):.3g} ms"
            yield Figure("gpu", f"{label(program, ranks)}: {text}", ratio(program, ddp, key), "x DDP", note)
        peak, between = program.most("tensor_peak_bytes"), program.most("tensor_bytes")
        parameters = program.most("parameter_bytes")
        note = f"{between / parameters:.3g} P between steps"
        yield Figure("gpu", f"{label(program, ranks)}: tensors at the peak", peak / parameters, "P", note)


def device_figures(program: Program, ranks: str) -> Iterator[Figure]:
    name = label(program, ranks)
    seen = program.ask("copies")[0]
    note = f"{seen['copies']} of {seen['kernels']} kernels, {1e3 * seen['kernel_seconds']:.3g} ms"
    yield Figure("gpu", f"{name}: copies on the compute stream", 1e3 * seen["copy_seconds"], "ms a step", note)
    replay = program.ask("graph")[0]
    if "error" in replay:
        print(f"gpu  {name}: not captured in a graph: {replay['error']}", flush=True)
        return
    eager, replayed = (statistics.median(replay[key]) for key in ("eager_seconds", "seconds"))
    note = f"{1e3 * replayed:.3g} ms, eager {1e3 * eager:.3g} ms"
    yield Figure("gpu", f"{name}: forward and backward from a graph", replayed / eager, "x eager", note)
