"""Builds each mutant of the library beside the checkout and says which test of `make test` fails first.

usage: run.py [--from NAME] [--lanes N] [--healthy] [--forget] [WORDS ...]

With words, only the mutants whose name has them. The tests are those of build/dev (`make test` builds them). Ends with
an error when the tests of a language do not notice a mutant. noticed.tsv is the table of what noticed which: that test
is asked first, and whatever fails in its place is written down there as soon as it is known.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lane import ROOT, TESTS, Lane, Noticed
from mutant import Mutant
from mutants import MUTANTS

TABLE = Path(__file__).with_name("noticed.tsv")
COLUMNS = "mutant\tcpp\tpython"
NOT_NOTICED = "(not noticed)"


def read_table() -> dict[str, Noticed]:
    lines = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
    return {name: Noticed(*(None if cell in ("", NOT_NOTICED) else cell for cell in cells)) for name, *cells in lines}


def write_table(table: dict[str, Noticed]) -> None:
    def cell(test: str | None) -> str:
        return NOT_NOTICED if test == "" else test or ""

    named = {mutant.name: table.get(mutant.name, Noticed()) for mutant in MUTANTS}
    rows = [f"{name}\t{cell(noticed.cpp)}\t{cell(noticed.python)}" for name, noticed in named.items()]
    TABLE.write_text("\n".join([COLUMNS, *rows, ""]))


def try_all(chosen: list[Mutant], lanes: list[Lane], table: dict[str, Noticed], forget: bool) -> list[Mutant]:
    """Those that were not noticed in each of their languages."""
    free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for lane in lanes:
        free.put(lane)
    lock = threading.Lock()
    missed = []

    def attempt(mutant: Mutant) -> None:
        lane, began = free.get(), time.monotonic()
        try:
            found = lane.try_mutant(mutant, Noticed() if forget else table.get(mutant.name, Noticed()))
        finally:
            free.put(lane)
        with lock:
            if not found.everywhere:
                missed.append(mutant)
            told = ", ".join(test or "NOT NOTICED" for test in (found.cpp, found.python) if test is not None)
            print(f"{mutant.name}: {told}  {time.monotonic() - began:.0f} s", flush=True)
            table[mutant.name] = found
            write_table(table)

    with ThreadPoolExecutor(len(lanes)) as pool:
        for done in [pool.submit(attempt, mutant) for mutant in chosen]:
            done.result()
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="start", help="leave out those before the one of this name")
    parser.add_argument("--lanes", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time")
    parser.add_argument("--healthy", action="store_true", help="first see that all tests pass without a mutant")
    parser.add_argument("--forget", action="store_true", help="do not ask first what noticed it last time")
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    names = [mutant.name for mutant in MUTANTS]
    start = names.index(arguments.start) if arguments.start else 0
    chosen = [mutant for mutant in MUTANTS[start:] if " ".join(arguments.words) in mutant.name]
    if shutil.which("ninja") is None or shutil.which("cmake") is None or not (TESTS / "rank_tests").exists():
        sys.exit("The mutants need cmake and ninja on the PATH, and the tests of build/dev: run `make test` first.")
    lanes = [Lane(ROOT / "build" / "mutants" / str(number)) for number in range(min(arguments.lanes, len(chosen)))]
    needs_build = not all(mutant.is_in_package for mutant in chosen)
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(lambda lane: lane.prepare(needs_build), lanes))
    if arguments.healthy and (failed := lanes[0].first_failure_in_cpp() or lanes[0].first_failure_in_python(None)):
        sys.exit(f"Without any mutant this fails: {failed}")
    missed = try_all(chosen, lanes, read_table(), arguments.forget)
    print(f"{len(chosen) - len(missed)} passed, {len(missed)} failed", flush=True)
    for mutant in missed:
        print(f"not noticed in each of its languages: {mutant.name}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
