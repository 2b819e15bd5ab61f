"""Runs the test suites and closes with one line: N passed, N failed, N skipped.

usage: run.py [--suites NAME ...] [--rows] [--budgets] [--fresh-clone]    what `make test` runs
       run.py --changed [OPTION ...]    what the last changes can break (changed.py), built with these options of
                                        scripts/build.py
       run.py [--until T] --parts [NAME ...]    parts of parts.py; without names all, those first that a change calls
                                                for; what ran before is added to the closing line
Logs and reports lie in build/test. A suite that crashes, stays away, runs no test or outlasts its time counts as a
failed test; so does the row check if it finds a problem and, with --budgets, what takes more CPU time than budgets.tsv
allows (seconds.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import changed
import check_rows
import parts
import seconds
import tables
from programs import ROOT, current_commit, last_lines, run_program
from reports import FAILED, PASSED, SKIPPED, Result, counts, write_closing_line
from suites import MINUTES, OUT, ROW_SUITES, Suite, ci_names, fresh_clone, is_among, product_suites

BUILD = [sys.executable, str(ROOT / "scripts" / "build.py")]


def run_suite(suite: Suite) -> tuple[list[Result], float]:
    """Its results, and the CPU seconds that it took."""
    log = suite.file("log")
    for old in (suite.file("xml"), log):
        old.unlink(missing_ok=True)
    print(f"{suite.name}: running, its output goes to {log.relative_to(ROOT)}", flush=True)
    began = time.monotonic()
    ended, cpu = run_program(suite.command, log, suite.limit, ROOT, {**os.environ, **suite.environment})
    results = judge(suite, ended, suite.read(suite.name, suite.file("xml")))
    took = f"{time.monotonic() - began:.0f} s, {cpu:.0f} s of CPU time"
    print(f"{suite.name}: {counts(results)} in {took}", flush=True)
    return results, cpu


def judge(suite: Suite, ended: str, results: list[Result]) -> list[Result]:
    """The results, and one that failed for what they do not tell: a crash, or that there are none."""
    if not results:
        problem = f"{ended or 'it ended well'}, but there is no report of a test"
    elif ended and not any(result.outcome == FAILED for result in results):
        problem = f"{ended}, though no test of its report failed"
    else:
        return results
    message = f"{problem}\n{last_lines(suite.file('log'), 60)}"
    return [*results, Result(suite.name, "", "the whole suite", FAILED, message)]


def run_suites(suites: Sequence[Suite], has_budget: bool = False) -> list[Result]:
    """Their results; their seconds are shown. Four suites at a time: ranks wait for each other, and for time limits, as
    long as they compute."""
    with ThreadPoolExecutor(4) as pool:
        ran = list(pool.map(run_suite, suites))
    results = [result for found, _ in ran for result in found]
    if results:
        print(seconds.slowest(results), flush=True)
    if has_budget:
        used = seconds.of_builds(*(ROOT / "build" / "dev" / folder for folder in ("csrc", "test", "examples")))
        for suite, (_, cpu) in zip(suites, ran, strict=True):
            used[suite.family] = used.get(suite.family, 0) + cpu
        results.append(seconds.check(used))
        print(f"used and allowed (budgets.tsv):\n{results[-1].message}", flush=True)
    return results


def row_check(results: list[Result], tier: str = "") -> Result:
    """Both sides have every row: those of a tier (suites.py), else all."""
    sides = {
        "cpp": ("unit_tests", "rank_tests", "rank_ci", "program_tests"),
        "py": ("python_unit", "python_ranks", "python_interop", "python_ci"),
    }
    ran = {side: [each for each in results if each.suite.startswith(names)] for side, names in sides.items()}

    def is_wanted(row: check_rows.Wanted) -> bool:
        left = is_among(row.title.replace("::", "."), ci_names(python=row.language == "py"))
        return not tier or left == (tier == "ci")

    problems = check_rows.check_files(ran["cpp"], ran["py"], is_wanted)
    print(f"rows: {len(problems)} problems{'' if problems else ', every row is there or excepted'}")
    return Result("rows", "", "both sides have every row", FAILED if problems else PASSED, "\n".join(problems))


def run_part(part: parts.Part) -> list[Result]:
    began = time.monotonic()
    print(f"part {part.name}:", flush=True)
    log = OUT / f"{part.name}.build.log"
    log.unlink(missing_ok=True)
    problem, _ = run_program([*BUILD, *part.build], log, 60 * MINUTES, ROOT, dict(os.environ))
    if problem:
        return [Result(part.name, "", "build", FAILED, f"{problem}\n{last_lines(log, 60)}")]
    results = run_suites(part.suites())
    if part.name == "ci":
        results.append(row_check(results, "ci"))
    if not any(result.outcome == FAILED for result in results):
        row = [part.name, current_commit(), f"{(time.monotonic() - began) / MINUTES:.1f}", counts(results)]
        tables.put(parts.TABLE, row, [each.name for each in parts.PARTS])
    return results


def run_parts(names: Sequence[str], until: float) -> list[Result]:
    table = tables.by_name(parts.TABLE)
    passed = {name: row["commit"] for name, row in table.items()}
    slower = parts.pace(table, current_commit().rstrip("+"))
    chosen = [part for part in parts.PARTS if part.name in names or not names]
    results = []
    for part in sorted(chosen, key=lambda part: not parts.is_called_for(part, passed.get(part.name))):
        minutes = slower * part.minutes
        if time.time() + minutes * MINUTES <= until:
            results += run_part(part)
        else:
            print(f"part {part.name}: left out, for its {minutes:.0f} minutes do not fit into the time", flush=True)
    return results


def run_changed(options: Sequence[str]) -> list[Result]:
    chosen = changed.choose(changed.changed_files())
    programs = ["bound_models" if suite.name == "python_changed" else suite.name for suite in chosen]
    targets = ["shardwise", "shardwise_python", *programs]
    built = subprocess.run([*BUILD, "dev", *options, "--install", "--target", *targets])
    if built.returncode != 0:
        return [Result("changed", "", "build", FAILED, "the compiler says above what is wrong")]
    return run_suites(chosen)


def run_product(names: set[str], all_names: set[str], rows_only: bool, has_budget: bool) -> list[Result]:
    results = run_suites([suite for suite in product_suites(rows_only) if suite.family in names], has_budget)
    if names >= (ROW_SUITES if rows_only else all_names):
        results.append(row_check(results, "" if rows_only else "change"))
    return results


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
    names = list(dict.fromkeys(suite.family for suite in product_suites()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--budgets", action="store_true")
    parser.add_argument("--fresh-clone", action="store_true")
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--parts", nargs="*", choices=[part.name for part in parts.PARTS])
    parser.add_argument("--changed", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if given.parts is not None:
        results = run_parts(given.parts, given.until)
    elif given.changed is not None:
        results = run_changed(given.changed)
    else:
        results = run_product(set(given.suites), set(names), given.rows, given.budgets)
    if given.fresh_clone:
        results += run_suite(fresh_clone())[0]
    show_failures(results)
    show_skips(results)
    write_closing_line(OUT / "closing_line", results, adds=given.parts is not None)
    return int(any(result.outcome == FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
