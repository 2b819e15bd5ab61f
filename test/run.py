"""Runs the test suites and closes with one line: N passed, N failed, N skipped.

usage: run.py [--suites NAME ...] [--rows] [--fresh-clone] [--changed] [--budgets]    what `make test` runs
       run.py --parts [NAME ...] [--until T] [--add]    parts of parts.py; without names all, those first that a change
                                                        calls for
Logs and reports lie in build/test. A suite that crashes, stays away, runs no test or outlasts its time counts as a
failed test; so does the row check if it finds a problem and, with --budgets, what takes more CPU time than budgets.tsv
allows (seconds.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import changed
import check_rows
import fresh_clone
import parts
import seconds
import tiers
from programs import last_lines, run_program
from reports import FAILED, PASSED, SKIPPED, Result, counts, read_counts
from suites import MINUTES, OUT, ROOT, ROW_SUITES, Suite, product_suites, rows_only


def run_suite(suite: Suite) -> list[Result]:
    for old in (suite.report, suite.log, suite.seconds):
        old.unlink(missing_ok=True)
    print(f"{suite.name}: running, its output goes to {suite.log.relative_to(ROOT)}", flush=True)
    began = time.monotonic()
    environment = {**os.environ, **suite.environment, "SHARDWISE_TEST_SECONDS": str(suite.seconds)}
    ended = run_program(suite.command, suite.log, suite.limit, ROOT, environment)
    results = judge(suite, ended, read_report(suite))
    print(f"{suite.name}: {counts(results)} in {time.monotonic() - began:.0f} s", flush=True)
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


def run_suites(suites: Sequence[Suite]) -> list[Result]:
    """Their results; their seconds are shown. Four suites at a time: ranks wait for each other, and for time limits, as
    long as they compute."""
    with ThreadPoolExecutor(4) as pool:
        results = [result for found in pool.map(run_suite, suites) for result in found]
    took = [test for suite in suites for test in seconds.read(suite.name, suite.seconds)]
    if took:
        print(seconds.report(took), flush=True)
    return results


def budget_check(suites: Sequence[Suite]) -> Result:
    took = [test for suite in suites for test in seconds.read(suite.name, suite.seconds)]
    used = seconds.of_suites(took)
    for folder in ("csrc", "test", "examples"):
        used |= seconds.of_builds(ROOT / "build" / "dev" / folder)
    result = seconds.check(used)
    print(f"used and allowed (budgets.tsv):\n{result.message}", flush=True)
    return result


def row_check(results: list[Result], tier: str = "") -> Result:
    """Both sides have every row: those of a tier (tiers.py), else all."""
    sides = {
        "cpp": ("unit_tests", "rank_tests", "rank_ci", "program_tests"),
        "py": ("python_unit", "python_ranks", "python_interop", "python_ci"),
    }
    ran = {side: [each for each in results if each.suite.startswith(names)] for side, names in sides.items()}

    def is_wanted(row: check_rows.Wanted) -> bool:
        left = tiers.is_among(row.title.replace("::", "."), tiers.names(python=row.language == "py"))
        return not tier or left == (tier == "ci")

    problems = check_rows.check_files(ran["cpp"], ran["py"], is_wanted)
    print(f"rows: {len(problems)} problems{'' if problems else ', every row is there or excepted'}")
    return Result("rows", "", "both sides have every row", FAILED if problems else PASSED, "\n".join(problems))


def run_part(part: parts.Part) -> list[Result]:
    began = time.monotonic()
    print(f"part {part.name}:", flush=True)
    log = OUT / f"{part.name}.build.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "build.py"), *part.build]
    problem = run_program(command, log, 60 * MINUTES, ROOT, dict(os.environ))
    if problem:
        return [Result(part.name, "", "build", FAILED, f"{problem}\n{last_lines(log, 60)}")]
    results = run_suites(part.suites())
    if part.name == "ci":
        results.append(row_check(results, "ci"))
    if not any(result.outcome == FAILED for result in results):
        minutes = f"{(time.monotonic() - began) / MINUTES:.1f}"
        parts.write_passed(part, parts.Passed(parts.current_commit(), minutes, counts(results)))
    return results


def run_parts(names: Sequence[str], until: float | None) -> list[Result]:
    passed = parts.read_passed()
    chosen = [part for part in parts.PARTS if part.name in names or not names]
    results = []
    for part in parts.in_order(chosen, lambda part: parts.is_called_for(part, passed.get(part.name))):
        if parts.fits(part, until):
            results += run_part(part)
        else:
            print(f"part {part.name}: left out, for its {part.minutes} minutes do not fit into the time", flush=True)
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
    parser.add_argument("--suites", nargs="+", choices=names, default=names, help="only these, without the row check")
    parser.add_argument(
        "--rows",
        action="store_true",
        help="in short: the rows of rows.tsv, with their check, and what is about the package",
    )
    parser.add_argument("--changed", action="store_true", help="only what the last changes can break (changed.py)")
    parser.add_argument("--budgets", action="store_true", help="what takes more CPU time than budgets.tsv allows fails")
    parser.add_argument("--fresh-clone", action="store_true", help="also run the README's commands in a new clone")
    parser.add_argument(
        "--parts", nargs="*", metavar="NAME", help="parts alone: " + ", ".join(p.name for p in parts.PARTS)
    )
    parser.add_argument("--until", type=float, help="begin no part that will not be done at this time (of `date +%%s`)")
    parser.add_argument("--add", action="store_true", help="add what ran before to the closing line")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts or ()) - {part.name for part in parts.PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    OUT.mkdir(parents=True, exist_ok=True)
    closing_line = OUT / "closing_line"
    before = read_counts(closing_line.read_text()) if arguments.add and closing_line.exists() else {}
    results: list[Result] = []
    if arguments.parts is not None:
        results += run_parts(arguments.parts, arguments.until)
    elif arguments.changed:
        results += run_suites(changed.choose(changed.changed_files()))
    else:
        chosen = [suite for suite in product_suites() if suite.family in arguments.suites]
        results += run_suites([rows_only(suite) for suite in chosen] if arguments.rows else chosen)
        if set(arguments.suites) >= (ROW_SUITES if arguments.rows else set(names)):
            results.append(row_check(results, "" if arguments.rows else "change"))
        if arguments.budgets:
            results.append(budget_check(chosen))
    if arguments.fresh_clone:
        results += fresh_clone.run(OUT / "fresh_clone.log")
    show_failures(results)
    show_skips(results)
    closing_line.write_text(f"{counts(results, before)}\n")
    print(closing_line.read_text(), end="", flush=True)
    return int(any(result.outcome == FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
