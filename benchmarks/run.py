"""Measures shardwise beside torch's own wrappings and prints a line for each figure.

benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import callgrind
import checkpoint
import collectives
import cycles
import gpu
import host
import hosts
import machine
import memory
import overlap
import peers
import pipeline
import scale
import steps
from figures import Figure, save

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")
SUITES = (
    "host", "memory", "scale", "steps", "cycles", "collectives", "overlap", "pipeline", "hosts", "checkpoint", "gpu",
)  # fmt: skip
#: Timelines of steps.
PICTURES = {"overlap": ("timeline.svg", overlap), "pipeline": ("pipeline.svg", pipeline)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer rounds: within two minutes")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--save", action="store_true", help="keep the figures in --results")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--instructions", action="store_true", help="also count instructions, under valgrind")
    parser.add_argument("--callgrind", type=Path, help="an existing folder for callgrind's files")
    parser.add_argument("--only", default="", help="of steps: wrappings whose name begins so, such as C++, beside DDP")
    parser.add_argument("--rounds", type=int, help="of steps: how often each wrapping has its turn")
    options = parser.parse_args()
    if not callgrind.program(BUILD).is_file():
        print(
            f"bench: there is no program at {callgrind.program(BUILD)}. Run `make bench`, or configure with "
            "-DSHARDWISE_BUILD_BENCHMARKS=ON and build.",
            file=sys.stderr,
        )
        return 1
    begin = time.monotonic()
    facts = machine.facts() | {"run": " ".join([*switches(), *sys.argv[1:]])}
    print("".join(f"{name}: {value}\n" for name, value in facts.items()), flush=True)
    figures = []
    try:
        for figure in measure(options):
            figures.append(figure)
            print(figure.line(), flush=True)
    except (KeyboardInterrupt, RuntimeError, OSError) as error:
        # What took long is not lost.
        facts["ended early"] = str(error) or "interrupted"
        print(f"bench: ended early: {facts['ended early']}", file=sys.stderr)
    print(f"\n{len(figures)} figures in {time.monotonic() - begin:.0f} s")
    if options.save and figures:
        saved = save(options.results, facts, figures)
        for suite, (name, module) in PICTURES.items():
            if suite in options.suites and "ended early" not in facts:
                saved.append(options.results / name)
                module.draw(BUILD, module.SHORT, saved[-1])
        print("\n".join(f"saved {path}" for path in saved))
    return int("ended early" in facts)


def switches() -> list[str]:
    """What the environment says of our transport."""
    return [f"{name}={os.environ[name]}" for name in ("SHARDWISE_SHARED_MEMORY",) if name in os.environ]


def may_count(options: argparse.Namespace) -> bool:
    problem = callgrind.problem(BUILD) if options.instructions else "--instructions was not given"
    if problem:
        print(f"no instructions are counted: {problem}", flush=True)
    return not problem


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    if "host" in options.suites:
        commands = host.commands(BUILD, host.SHORT if options.quick else host.FULL)
        yield from host.figures(host.microseconds(commands), "us", 1)
        if may_count(options):
            counted = callgrind.count(commands, options.callgrind, kind=host.kind)
            yield from host.figures(counted.costs, "k instructions", 1e3)
            yield from host.kind_figures(counted.kinds)
    if "memory" in options.suites:
        allocator, resident = memory.SHORT if options.quick else memory.FULL
        yield from memory.allocator_figures(BUILD, allocator)
        yield from memory.resident_figures(BUILD, resident)
    if "scale" in options.suites:
        extent = scale.SHORT if options.quick else scale.FULL
        yield from scale.model_figures(BUILD, extent)
        yield from scale.large_figures(BUILD, extent)
        if may_count(options):
            yield from scale.setup_figures(BUILD, extent)
            yield from scale.step_figures(BUILD, extent)
    if "steps" in options.suites:
        name = "steps_shared_memory" if os.environ.get("SHARDWISE_SHARED_MEMORY") == "on" else "steps"
        found = steps.suite(BUILD, options.quick, peers.installed(), options.only, options.rounds)
        yield from (replace(figure, suite=name) for figure in found)
    if "cycles" in options.suites:
        yield from cycles.suite(BUILD, cycles.SHORT if options.quick else cycles.FULL)
    if "collectives" in options.suites:
        yield from collectives.figures(BUILD, collectives.SHORT if options.quick else collectives.FULL)
    if "overlap" in options.suites:
        yield from overlap.suite(BUILD, options.quick)
    if "pipeline" in options.suites:
        yield from pipeline.figures(BUILD, pipeline.SHORT if options.quick else pipeline.FULL)
    if "hosts" in options.suites:
        yield from hosts.suite(BUILD, *(hosts.SHORT if options.quick else hosts.FULL))
    if "checkpoint" in options.suites:
        yield from checkpoint.suite(checkpoint.SHORT if options.quick else checkpoint.FULL)
    if "gpu" in options.suites:
        yield from gpu.suite(BUILD, full=not options.quick)


if __name__ == "__main__":
    # What was measured is kept; a shell may have told its background jobs to ignore Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
