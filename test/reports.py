"""Reads what the test programs report: JUnit's XML (GoogleTest, pytest), Catch2's own XML, or closing lines."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

#: So many lines of what a failed test wrote to stderr are shown.
LAST_LINES = 40


@dataclass(frozen=True)
class Result:
    """One test that a suite has: `group` is its class or test suite, `message` why it failed or was skipped."""

    suite: str
    group: str
    name: str
    outcome: str
    message: str = ""

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


def read_junit(suite: str, report: Path) -> list[Result]:
    return [_junit_result(suite, case) for case in ElementTree.parse(report).iter("testcase")]


def _junit_result(suite: str, case: ElementTree.Element) -> Result:
    group, name = case.get("classname", ""), case.get("name", "")
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


def read_catch2(suite: str, report: Path) -> list[Result]:
    return [_catch2_result(suite, case) for case in ElementTree.parse(report).iter("TestCase")]


def _catch2_result(suite: str, case: ElementTree.Element) -> Result:
    group, _, name = case.get("name", "").rpartition(".")
    overall = case.find("OverallResult")
    if overall is not None and overall.get("success") == "true":
        return Result(suite, group, name, PASSED)
    return Result(suite, group, name, FAILED, "\n".join(_catch2_messages(case)))


def _catch2_messages(case: ElementTree.Element) -> Iterator[str]:
    for element in case.iter():
        where = f"{element.get('filename')}:{element.get('line')}: "
        if element.tag == "Expression" and element.get("success") == "false":
            yield where + " ".join(f"{part.tag}: {(part.text or '').strip()}" for part in element)
        elif element.tag in ("Exception", "FatalErrorCondition") and element.get("filename"):
            yield where + (element.text or "").strip()
        elif element.tag == "Failure":
            yield (element.text or "").strip()


def read_closing_line(suite: str, report: Path) -> list[Result]:
    """Of a program that reports nothing but `N passed, N failed` in its log, beside where a report would be."""
    log = report.with_suffix(".log").read_text(errors="replace")
    found = read_counts((re.findall(r"^\d+ passed, \d+ failed.*$", log, re.MULTILINE) or [""])[-1])
    named = iter(re.findall(r"^not noticed .*: (.+)$", log, re.MULTILINE))
    return [Result(suite, "", next(named, "") if outcome == FAILED else "", outcome)
            for outcome, number in found.items() for _ in range(number)]  # fmt: skip
