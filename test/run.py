"""Runs every test suite and closes with one line: N passed, N failed, N skipped.

usage: run.py [--fast] [--fresh-clone] [--suites NAME ...] | --sanitizers KIND ...
Logs and reports lie in build/test. A suite that crashes,
stays away, runs no test or outlasts its time counts as a failed test; so does the row check if it finds a problem.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import check_rows
import fresh_clone
from programs import last_lines, run_program
from reports import FAILED, PASSED, SKIPPED, Result, read_catch2, read_junit

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "test"
MINUTES = 60
SANITIZERS = {
    # torch itself leaks, and its libraries are not instrumented.
    "address": {"ASAN_OPTIONS": "detect_leaks=0"},
    "undefined": {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": f"suppressions={ROOT / 'test' / 'tsan.supp'}:ignore_noninstrumented_modules=1"},
}


@dataclass(frozen=True)
class Suite:
    """A program that runs tests and writes a report. `fast` are the arguments that leave slow tests out."""

    name: str
    command: list[str]
    fast: list[str]
    read: Callable[[str, Path], list[Result]]
    limit: int
    environment: dict[str, str]

    @property
    def report(self) -> Path:
        return OUT / f"{self.name}.xml"

    @property
    def log(self) -> Path:
        return OUT / f"{self.name}.log"


def cpp_suites(suffix: str = "", **environment: str) -> list[Suite]:
    programs = ROOT / "build" / "dev" / "test" / "cpp"
    unit, ranks, random = f"unit_tests{suffix}", f"rank_tests{suffix}", f"program_tests{suffix}"
    return [
        Suite(unit, [str(programs / "unit_tests"), "-r", "xml", "-o", str(OUT / f"{unit}.xml")],
              ["~[slow]"], read_catch2, 5 * MINUTES, environment),
        Suite(ranks, [str(programs / "rank_tests"), f"--gtest_output=xml:{OUT / ranks}.xml"],
              ["--gtest_filter=-*Slow*"], read_junit, 20 * MINUTES, environment),
        Suite(random, [str(programs / "program_tests"), "-r", "xml", "-o", str(OUT / f"{random}.xml")],
              ["~[slow]"], read_catch2, 10 * MINUTES, environment),
    ]  # fmt: skip


def sanitized_suites(kind: str) -> list[Suite]:
    """The programs of build/dev with the library of build/KIND in the place of theirs."""
    folder = ROOT / "build" / kind / "csrc"
    linked = subprocess.run(["ldd", folder / "libshardwise.so"], capture_output=True, text=True, check=True).stdout
    # A program that is not built with it must load it before all else; the one for undefined behaviour need not.
    runtime = re.findall(r"=> (\S+/lib[at]san\S+)", linked)
    preloaded = {"LD_PRELOAD": runtime[0]} if runtime else {}
    return cpp_suites(f"-{kind}", LD_LIBRARY_PATH=str(folder), **preloaded, **SANITIZERS[kind])


def python_suite() -> Suite:
    command = [sys.executable, "-m", "pytest", "-v", "test/python", f"--junitxml={OUT / 'pytest.xml'}"]
    return Suite("pytest", command, ["-m", "not slow"], read_junit, 35 * MINUTES, {})


def run_suite(suite: Suite, fast: bool) -> list[Result]:
    for old in (suite.report, suite.log):
        old.unlink(missing_ok=True)
    print(f"{suite.name}: running, its output goes to {suite.log.relative_to(ROOT)}", flush=True)
    began = time.monotonic()
    ended = run_program(
        [*suite.command, *(suite.fast if fast else [])],
        suite.log,
        suite.limit,
        ROOT,
        {**os.environ, **suite.environment},
    )
    results = judge(suite, ended, read_report(suite))
    seconds = time.monotonic() - began
    print(f"{suite.name}: {counts(results)} in {seconds:.0f} s", flush=True)
    return results


def read_report(suite: Suite) -> list[Result]:
    try:
        return suite.read(suite.name, suite.report)
    except (OSError, SyntaxError):  # no report, or one that breaks off
        return []


def judge(suite: Suite, ended: str, results: list[Result]) -> list[Result]:
    """The results, and one that failed for what they do not tell: a crash, or that there are none."""
    if not results:
        problem = f"{ended or 'it ended well'}, but there is no report of a test"
    elif ended and not any(result.outcome == FAILED for result in results):
        problem = f"{ended}, though no test of its report failed"
    else:
        return results
    message = f"{problem}\n{last_lines(suite.log, 60)}"
    return [*results, Result(suite.name, "", "the whole suite", FAILED, message)]


def row_check(results: list[Result]) -> Result:
    sides = {"cpp": ("unit_tests", "rank_tests", "program_tests"), "py": ("pytest",)}
    ran = {side: [result for result in results if result.suite in names] for side, names in sides.items()}
    problems = check_rows.check_files(ran["cpp"], ran["py"])
    print(f"rows: {len(problems)} problems{'' if problems else ', every row is there or excepted'}")
    return Result("rows", "", "both sides have every row", FAILED if problems else PASSED, "\n".join(problems))


def counts(results: list[Result]) -> str:
    number = {outcome: sum(result.outcome == outcome for result in results) for outcome in (PASSED, FAILED, SKIPPED)}
    return ", ".join(f"{count} {outcome}" for outcome, count in number.items())


def show_failures(results: list[Result]) -> None:
    for result in results:
        if result.outcome == FAILED:
            print(f"\nFAILED {result.suite}: {result.title}\n{result.message}")


def show_skips(results: list[Result]) -> None:
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.outcome == SKIPPED:
            reasons.setdefault((result.suite, result.message or "no reason given"), []).append(result.title)
    for (suite, reason), titles in reasons.items():
        print(f"skipped in {suite}: {reason}: {', '.join(titles)}")


def main() -> int:
    development = [*cpp_suites(), python_suite()]
    names = [suite.name for suite in development]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave slow tests and the row check out")
    parser.add_argument("--fresh-clone", action="store_true", help="also run the README's commands in a new clone")
    parser.add_argument("--suites", nargs="+", choices=names, default=names, help="only these, without the row check")
    parser.add_argument("--sanitizers", nargs="+", choices=SANITIZERS, help="instead the C++ tests with these")
    arguments = parser.parse_args()
    if arguments.sanitizers:
        chosen = [suite for kind in arguments.sanitizers for suite in sanitized_suites(kind)]
    else:
        chosen = [suite for suite in development if suite.name in arguments.suites]
    OUT.mkdir(parents=True, exist_ok=True)
    results = [result for suite in chosen for result in run_suite(suite, arguments.fast)]
    if chosen == development and not arguments.fast:
        results.append(row_check(results))
    if arguments.fresh_clone:
        results += fresh_clone.run(OUT / "fresh_clone.log")
    show_failures(results)
    show_skips(results)
    closing_line = counts(results)
    (OUT / "closing_line").write_text(f"{closing_line}\n")
    print(closing_line, flush=True)
    return int(any(result.outcome == FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
