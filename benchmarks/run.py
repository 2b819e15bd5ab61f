"""Measures shardwise beside torch's own wrappings and prints a line for each figure.

benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import collectives
import host
import machine
import ranks
from figures import Figure, save

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")
SUITES = ("host", "ranks", "collectives")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer rounds: within two minutes")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--save", action="store_true", help="keep the figures in --results")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--callgrind", type=Path, help="an existing folder for callgrind's files")
    options = parser.parse_args()
    if not host.program(BUILD).is_file():
        print(
            f"bench: there is no program at {host.program(BUILD)}. Run `make bench`, or configure with "
            "-DSHARDWISE_BUILD_BENCHMARKS=ON and build.",
            file=sys.stderr,
        )
        return 1
    begin = time.monotonic()
    facts = machine.facts() | {"run": " ".join(["--quick"] * options.quick + list(options.suites))}
    print("".join(f"{name}: {value}\n" for name, value in facts.items()), flush=True)
    figures = []
    for figure in measure(options):
        figures.append(figure)
        print(figure.line(), flush=True)
    print(f"\n{len(figures)} figures in {time.monotonic() - begin:.0f} s")
    if options.save:
        print("\n".join(f"saved {path}" for path in save(options.results, facts, figures)))
    return 0


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    if "host" in options.suites:
        sizes = [8] if options.quick else [8, 32]
        yield from host.figures(host.microseconds(host.programs(BUILD), sizes), "us", 1)
        problem = host.valgrind_problem(BUILD)
        if problem:
            print(f"host  no instructions were counted, only times: {problem}", flush=True)
        else:
            yield from host.figures(
                host.instructions(host.programs(BUILD), sizes, options.callgrind), "k instructions", 1e3
            )
    if "ranks" in options.suites:
        size = ranks.Size(4, 192, 3, 2) if options.quick else ranks.Size(6, 384, 11, 3)
        yield from ranks.figures(ranks.measure(BUILD, size))
    if "collectives" in options.suites:
        yield from collectives.figures(BUILD, collectives.SHORT if options.quick else collectives.FULL)


if __name__ == "__main__":
    sys.exit(main())
