"""Runs GoogleTest's tests by name, and goes on after one that ends the program."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from programs import run_program
from reports import FAILED, PASSED, SKIPPED, Result

ENDED = {"OK": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED}
#: How each test is told to begin and to end. What a test prints without an end of line may stand before.
LINE = re.compile(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] (\S+?)(?:, where .*)?(?: \(\d+ ms\))?$")


def tests_of(program: Path, chosen: str, environment: Mapping[str, str]) -> list[str]:
    """The names of the tests that a filter of GoogleTest's chooses."""
    command = [str(program), "--gtest_list_tests", f"--gtest_filter={chosen}"]
    listed = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=True).stdout
    names, group = [], ""
    for line in listed.splitlines():
        name = line.split("#")[0].rstrip()
        if line.startswith("  "):
            names.append(group + name.strip())
        elif name.endswith("."):
            group = name
    return [name for name in names if "DISABLED_" not in name]


def slice_of(tests: Sequence[str], number: int, of: int) -> list[str]:
    """One of so many slices that together have all of them. Neighbours, which take about as long, go apart."""
    return list(tests[number - 1 :: of])


def read_outcomes(suite: str, text: str) -> list[Result]:
    """Those of the tests that began, in the order of their ends; one that did not end comes last, and has failed."""
    found: dict[str, Result] = {}
    running = ""
    said: list[str] = []
    for line in text.splitlines():
        match = LINE.search(line)
        if match and match[1] == "RUN":
            running, said = match[2], []
        elif match and match[2] == running:
            outcome = ENDED[match[1]]
            message = "" if outcome == PASSED else "\n".join(said[-40:])
            found[running] = Result(suite, "", running, outcome, message)
            running = ""
        elif running:
            said.append(line)
    if running:
        found[running] = Result(suite, "", running, FAILED, "\n".join(["it ended the program", *said[-40:]]))
    return list(found.values())


def run_tests(
    suite: str, program: Path, tests: Sequence[str], log: Path, until: float, environment: Mapping[str, str]
) -> list[Result]:
    """Runs them until that time of time.monotonic(). Those that were not reached have failed, and say so."""
    results: list[Result] = []
    left = list(tests)
    while left and time.monotonic() < until:
        before = len(log.read_text(errors="replace")) if log.exists() else 0
        command = [str(program), f"--gtest_filter={':'.join(left)}"]
        ended = run_program(command, log, max(until - time.monotonic(), 1), program.parent, dict(environment))
        found = read_outcomes(suite, log.read_text(errors="replace")[before:])
        results += found
        done = {result.name for result in found}
        left = [name for name in left if name not in done]
        if not done:
            reason = f"{ended or 'the program ended'} before a test began"
            return [*results, *(Result(suite, "", name, FAILED, reason) for name in left)]
    return [*results, *(Result(suite, "", name, FAILED, "the time was up before it began") for name in left)]
