"""The suite `gpu`: steps of a GPT on GPUs, over NCCL, and over a wire that is modelled, each wrapping beside DDP.

Without a GPU nothing is measured, and a line says so.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    dtype: str = "float32"


@dataclass(frozen=True)
class Large:
    """A model of which only a few can be on a GPU together; the first is what the others are compared with."""

    extent: Extent
    sets: tuple[tuple[str, ...], ...]


#: A machine's own links, and a network's.
LINKS = (Link(8, 20, 200_000), Link(64, 50, 40_000), Link(512, 100, 40_000))
#: GPT of 1.3 thousand million parameters.
LARGE = Large(
    Extent(steps.Size(24, 2048, 16, world=8, rounds=5, steps=3), 1, 2048, links=LINKS, dtype="bfloat16"),
    (
        ("Python fsdp2", "Python fsdp2_keep", "Python fully_shard", "Python fully_shard_keep"),
        (steps.DDP, "Python replicate"),
    ),
)
FULL = (
    Extent(steps.Size(8, 512, 8, world=1, rounds=9, steps=5), 8, 512, links=LINKS),
    Extent(steps.Size(15, 768, 12, world=1, rounds=9, steps=5), 8, 512, links=LINKS),
)


#: Prints how many GPUs torch finds, and the version of the NCCL that is loaded, if there is one:
#: torch.cuda.nccl.version() is that which torch was built with.
_FIND = """
import contextlib, ctypes, torch
found = ctypes.c_int()
with contextlib.suppress(OSError): ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
nccl = found.value // 10000, found.value // 100 % 100, found.value % 100
print(torch.cuda.device_count(), *(nccl if found else ()))
"""


@dataclass(frozen=True)
class Gpus:
    """What torch finds here."""

    count: int
    nccl: tuple[int, ...] = ()

    @classmethod
    def found(cls, environment: Mapping[str, str] | None = None) -> Gpus:
        # In a process of its own: the ranks are to have the devices to themselves.
        command = [sys.executable, "-c", _FIND]
        words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        return cls(int(words[0]), tuple(map(int, words[1:])))

    def worlds(self) -> list[int]:
        """One rank, as many as there are GPUs, and two on each where NCCL can and may."""
        worlds = {1, self.count}
        if os.environ.get(ALLOWS_SEVERAL_RANKS) == "1" and self.nccl >= NCCL_OF_SEVERAL_RANKS:
            worlds.add(2 * self.count)
        return sorted(worlds)


def suite(build: Path, full: bool) -> Iterator[Figure]:
    gpus = Gpus.found()
    if gpus.count == 0:
        print("gpu  nothing was measured: torch finds no GPU here", flush=True)
        return
    for names in LARGE.sets:
        for link in LARGE.extent.links if full else LARGE.extent.links[:2]:
            yield from modelled(build, LARGE.extent, link, names)
    for extent in FULL if full else ():
        for world in gpus.worlds():
            yield from measured(build, extent, world, (steps.DDP, *CPP, *PYTHON))
        for link in extent.links:
            yield from modelled(build, extent, link, (steps.DDP, *PYTHON))


def command(name: str, build: Path, extent: Extent, world: int, store: Path) -> list[str]:
    size = replace(extent.size, world=world)
    words = ["--device", extent.device, "--batch", str(extent.batch), "--length", str(extent.length)]
    words += [] if extent.dtype == "float32" else ["--dtype", extent.dtype]
    return [*steps.command(name, build, size, store, None), *words]


def programs_of(
    build: Path, extent: Extent, world: int, names: Sequence[str], modelled: bool = False
) -> AbstractContextManager[list[Program]]:
    """With modelled peers of one rank each."""

    def words(name: str, store: Path) -> list[str]:
        return [*command(name, build, extent, world, store), *(["--modelled"] if modelled else [])]

    return started(words, names, 1 if modelled else world)


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
        busy = program.most("busy_seconds")
        yield time_figure(program, programs[0], str(link), "seconds", f", the wire busy for {1e3 * busy:.3g} ms")
        yield time_figure(program, programs[0], str(link), "host_seconds")
        yield memory_figure(program, str(link))


#: What is measured, and what figures call it.
TIMES = {"seconds": "step", "host_seconds": "host, until all is given to the device"}


def time_figure(program: Program, first: Program, ranks: str, key: str, more: str = "") -> Figure:
    note = f"median {1e3 * statistics.median(program.of_rounds(key)):.3g} ms{more}"
    unit = f"x {steps.NAMES[first.name]}"
    return Figure("gpu", f"{label(program, ranks)}: {TIMES[key]}", ratio(program, first, key), unit, note)


def memory_figure(program: Program, ranks: str) -> Figure:
    peak, between = program.most("tensor_peak_bytes"), program.most("tensor_bytes")
    parameters = program.most("parameter_bytes")
    note = f"{peak / 2**20:.0f} MiB; {between / parameters:.3g} P between steps"
    return Figure("gpu", f"{label(program, ranks)}: tensors at the peak", peak / parameters, "P", note)


def label(program: Program, ranks: str) -> str:
    millions = program.most("parameter_bytes") / 4e6
    return f"{millions:.0f} M, {ranks}: {steps.NAMES.get(program.name, program.name)}"


def turns_figures(programs: Sequence[Program], ranks: str) -> Iterator[Figure]:
    for program in programs:
        for key in TIMES:
            yield time_figure(program, programs[0], ranks, key)
        yield memory_figure(program, ranks)


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
