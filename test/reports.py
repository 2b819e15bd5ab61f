"""Reads what the test programs report: JUnit's XML, GoogleTest's output, or closing lines."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

#: So many lines of what a failed test wrote are shown.
LAST_LINES = 40
OUTCOMES = {"OK": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED}
#: How each test is told to begin and to end. What a test prints without an end of line may stand before.
LINE = re.compile(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] (\S+?)(?:, where .*)?(?: \(\d+ ms\))?$")


@dataclass(frozen=True)
class Result:
    """One test that a suite has: `group` is its class or test suite, `message` why it failed or was skipped; `seconds`
    by the clock."""

    suite: str
    group: str
    name: str
    outcome: str
    message: str = ""
    seconds: float = 0

    @property
    def title(self) -> str:
        return ".".join(part for part in (self.group, self.name) if part)


def counts(results: Iterable[Result], before: Mapping[str, int] | None = None) -> str:
    """The closing line of results, added to what is counted already."""
    number = {**dict.fromkeys((PASSED, FAILED, SKIPPED), 0), **(before or {})}
    for result in results:
        number[result.outcome] += 1
    return ", ".join(f"{count} {outcome}" for outcome, count in number.items())


def read_counts(line: str) -> dict[str, int]:
    return {outcome: int(number) for number, outcome in re.findall(rf"(\d+) ({PASSED}|{FAILED}|{SKIPPED})", line)}


def write_closing_line(file: Path, results: Iterable[Result], adds: bool) -> None:
    """Writes it down and shows it; `adds` them to those that it has."""
    before = read_counts(file.read_text()) if adds and file.exists() else {}
    file.write_text(f"{counts(results, before)}\n")
    print(file.read_text(), end="", flush=True)


def read_junit(suite: str, report: Path) -> list[Result]:
    """No results where there is no report, or one that breaks off."""
    try:
        cases = ElementTree.parse(report).iter("testcase")
        return [replace(_junit_result(suite, case), seconds=float(case.get("time") or 0)) for case in cases]
    except (OSError, SyntaxError):
        return []


def _junit_result(suite: str, case: ElementTree.Element) -> Result:
    group, name = case.get("classname", ""), case.get("name", "")
    if group.endswith(".global"):  # Catch2, whose tests have one title
        group, _, name = name.rpartition(".")
    failures = [element for element in case if element.tag in ("failure", "error")]
    if failures:
        texts = [element.text or element.get("message") or "" for element in failures]
        # Ranks that crash say why there alone.
        texts += ["\n".join((element.text or "").splitlines()[-LAST_LINES:]) for element in case.iter("system-err")]
        return Result(suite, group, name, FAILED, "\n".join(texts).strip())
    skip = case.find("skipped")
    if skip is not None:
        # GoogleTest's message begins with a line that says where; pytest's is the reason alone.
        lines = skip.get("message", "").strip().splitlines()
        return Result(suite, group, name, SKIPPED, " ".join(lines[1:] or lines))
    if case.get("status") == "notrun":
        return Result(suite, group, name, SKIPPED, "its name begins with DISABLED_")
    return Result(suite, group, name, PASSED)


def read_googletest(suite: str, text: str) -> list[Result]:
    """Those of the tests that began, in the order of their ends; one that did not end comes last, and has failed."""
    found: list[Result] = []
    running, said = "", list[str]()
    for line in text.splitlines():
        match = LINE.search(line)
        if match and match[1] == "RUN":
            running, said = match[2], []
        elif match and match[2] == running:
            outcome = OUTCOMES[match[1]]
            found.append(
                Result(suite, "", running, outcome, "" if outcome == PASSED else "\n".join(said[-LAST_LINES:]))
            )
            running = ""
        elif running:
            said.append(line)
    if running:
        found.append(Result(suite, "", running, FAILED, "\n".join(["it ended the program", *said[-LAST_LINES:]])))
    return found


def results_of(suite: str, closing_line: str, failed: Iterable[str] = ()) -> list[Result]:
    """As many as the line counts; those that failed have these names."""
    names = iter(failed)
    return [Result(suite, "", next(names, "") if outcome == FAILED else "", outcome)
            for outcome, number in read_counts(closing_line).items() for _ in range(number)]  # fmt: skip


def read_closing_line(suite: str, report: Path) -> list[Result]:
    """Of a program that reports nothing but `N passed, N failed` in its log, beside where a report would be."""
    log = report.with_suffix(".log").read_text(errors="replace")
    last = (re.findall(r"^\d+ passed, \d+ failed.*$", log, re.MULTILINE) or [""])[-1]
    return results_of(suite, last, re.findall(r"^not noticed .*: (.+)$", log, re.MULTILINE))
