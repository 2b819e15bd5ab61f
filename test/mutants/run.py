"""Builds each mutant of the library beside the checkout and says which test of `make test` fails first.

usage: run.py [WORDS ...]    with words, only the mutants whose name has them

The tests are those of build/dev (`make test` builds them). Ends with an error when the tests of a language do not
notice a mutant. The test that noticed it last (mutants.tsv) is asked first, and whatever fails in its place is written
down there as soon as it is known.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import tables
from lane import Lane
from mutant import NOT_NOTICED, TABLE, Mutant, read_table
from programs import ROOT
from suites import PROGRAMS


def try_all(chosen: list[Mutant], lanes: list[Lane]) -> list[Mutant]:
    """Those that were not noticed in each of their languages."""
    free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for lane in lanes:
        free.put(lane)
    lock = threading.Lock()
    names = [mutant.name for mutant in read_table()]

    def attempt(mutant: Mutant) -> Mutant:
        lane, began = free.get(), time.monotonic()
        try:
            found = lane.try_mutant(mutant)
        finally:
            free.put(lane)
        with lock:
            told = ", ".join(filter(None, (found.cpp, found.python)))
            print(f"{mutant.name}: {told}  {time.monotonic() - began:.0f} s", flush=True)
            tables.put(TABLE, list(astuple(found)), names)
        return found

    with ThreadPoolExecutor(len(lanes)) as pool:
        return [found for found in pool.map(attempt, chosen) if NOT_NOTICED in (found.cpp, found.python)]


def main() -> None:
    words = " ".join(sys.argv[1:])
    chosen = [mutant for mutant in read_table() if words in mutant.name]
    if not chosen:
        sys.exit(f"No mutant has '{words}' in its name.")
    if shutil.which("ninja") is None or shutil.which("cmake") is None or not (PROGRAMS / "rank_tests").exists():
        sys.exit("The mutants need cmake and ninja on the PATH, and the tests of build/dev: run `make test` first.")
    number = min(len(os.sched_getaffinity(0)), len(chosen))
    lanes = [Lane(ROOT / "build" / "mutants" / str(lane)) for lane in range(number)]
    needs_build = not all(mutant.is_in_package for mutant in chosen)
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(lambda lane: lane.prepare(needs_build), lanes))
    missed = try_all(chosen, lanes)
    print(f"{len(chosen) - len(missed)} passed, {len(missed)} failed", flush=True)
    for mutant in missed:
        print(f"not noticed in each of its languages: {mutant.name}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
