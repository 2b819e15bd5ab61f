"""The suite `cycles`: where a step's processor time goes, by samples that Linux's `perf` takes of all threads."""

from __future__ import annotations

import os
import re
import select
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import steps
from figures import Figure
from kinds import Kind, kind_of
from turns import Program, started

SUITE = "cycles"
UNIT = "ms a step"
#: Samples a second of each thread.
RATE = 2000


KINDS = tuple(Kind(*each) for each in (
    ("matrix products", r"", r"gemm"),
    ("the optimizer", r"", r"adam"),
    ("sums of ranks", r"", r"transport::add_up|gloo::(sum|reduce)"),
    ("gradients into buckets", r"libtorch", r"mul_kernel"),
    ("other operations of torch", r"libtorch|libc10|libgomp|JIT", r""),
    ("copies in memory", r"libc\.", r"mem(move|cpy)"),
    ("copies to and from sockets", r"kernel", r"_copy_(to|from)_iter|copy_user"),
    ("pages", r"kernel", r"clear_page|fault|folio|anonymous_page|charge"),
    ("messages, and threads that wake", r"kernel", r""),
    ("the rest", r"", r""),
))  # fmt: skip
WAITS = "the training thread waits"
#: What is profiled, and whether through shared memory.
CASES = tuple(
    (name, shared)
    for shared in (True, False)
    for name in (steps.DDP_OVER_SHARDWISE, "C++ fully_shard", "C++ fully_shard_keep", "C++ replicate")
)


@dataclass(frozen=True)
class Extent:
    size: steps.Size
    cases: tuple[tuple[str, bool], ...]


SHORT = Extent(steps.SMALL, CASES[:2])
FULL = Extent(steps.Size(layers=15, width=768, heads=12, world=2, rounds=1, steps=8), CASES)


def suite(build: Path, extent: Extent) -> Iterator[Figure]:
    if shutil.which("perf") is None:
        print("no cycles are counted: there is no `perf` here", flush=True)
        return
    for name, shared in extent.cases:
        environment = {"SHARDWISE_SHARED_MEMORY": "on" if shared else "off"}

        def words(name: str, store: Path) -> list[str]:
            return steps.command(name, build, extent.size, store, None)

        with started(words, [name], extent.size.world, environment) as (program,):
            program.ask("3")
            yield from of_program(program, extent.size, "shared memory" if shared else "TCP")


def of_program(program: Program, size: steps.Size, transport: str) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        with sampled(program, Path(folder)):
            program.round(size.steps)
        found, training = counted(f"{folder}/samples")
    milliseconds = 1e3 / RATE / size.steps / size.world
    about = f"{program.most('parameter_bytes') / 4e6:.0f} M, {size.world} ranks, {transport}"
    about += f": {steps.shown_name(program.name)}"
    for each in KINDS:
        yield Figure(SUITE, f"{about}: {each.name}", milliseconds * found[each.name], UNIT)
    step = 1e3 * statistics.mean(program.of_rounds("seconds"))
    yield Figure(SUITE, f"{about}: {WAITS}", step - milliseconds * training, UNIT)
    yield Figure(SUITE, f"{about}: step", step, UNIT)


@contextmanager
def sampled(program: Program, folder: Path) -> Iterator[None]:
    """Meanwhile `perf` takes samples of all ranks, into a file of the folder. It answers to each order."""
    orders, answers = folder / "orders", folder / "answers"
    os.mkfifo(orders)
    os.mkfifo(answers)
    pids = ",".join(str(rank.pid) for rank in program.ranks)
    words = ["perf", "record", "-e", "cpu-clock", "-F", str(RATE), "-D", "-1", "-p", pids]
    words += ["--control", f"fifo:{orders},{answers}", "-o", str(folder / "samples")]
    # Opened for both ways, so that a `perf` that ends early does not keep this waiting for another end.
    with orders.open("r+b", buffering=0) as give, answers.open("r+b", buffering=0) as take:
        recording = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def say(order: bytes) -> None:
            give.write(order)
            while not select.select([take], [], [], 0.1)[0]:
                if recording.poll() is not None:
                    raise RuntimeError("bench: `perf` cannot sample: see /proc/sys/kernel/perf_event_paranoid")
            take.read(64)

        try:
            say(b"enable\n")
            yield
            say(b"stop\n")
            recording.wait()
        finally:
            recording.kill()
            recording.wait()


def counted(samples: str) -> tuple[Counter[str], int]:
    """How many samples of each kind there are, and how many of the threads that train."""
    words = ["perf", "script", "-i", samples, "-F", "pid,tid,ip,sym,dso"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: Counter[str] = Counter()
    training = 0
    for line in done.stdout.splitlines():
        if not (parts := re.match(r"\s*(\d+)/(\d+)\s+[0-9a-f]+\s+(.*) \((.*)\)$", line)):
            continue
        found[kind_of(KINDS, parts[4], parts[3])] += 1
        training += parts[1] == parts[2]
    return found, training
