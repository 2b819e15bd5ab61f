"""What tests and compilers took in CPU time: the slowest tests, the sums by folder, and the budgets of budgets.tsv.

A suite adds a line to its file for each test: title, source file, seconds, seconds of CPU time. The build leaves the
compiler's beside each object (scripts/timed.sh). Only CPU time is judged, since seconds depend on what else the machine
does. CPU time depends on it too, where cores share what they have: a budget has room for half as much again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tables
from check_rows import HERE
from programs import ROOT
from reports import FAILED, PASSED, Result

SLOWEST = 20


@dataclass(frozen=True)
class Took:
    """A test with its seconds; `folder` is where its source lies."""

    suite: str
    title: str
    folder: str
    wall: float
    cpu: float


def read(suite: str, file: Path) -> list[Took]:
    if not file.exists():
        return []
    took = []
    for line in file.read_text().splitlines():
        title, source, wall, cpu = line.split("\t")
        path = Path(source)
        folder = (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).parent.as_posix()
        took.append(Took(suite, title, folder, float(wall), float(cpu)))
    return took


def of_suites(took: Iterable[Took]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for test in took:
        sums[test.suite] = sums.get(test.suite, 0) + test.cpu
    return sums


def of_builds(*folders: Path) -> dict[str, float]:
    """Of each target of build folders, what its objects took when they were last compiled."""
    sums: dict[str, float] = {}
    for file in (file for folder in folders for file in folder.rglob("*.seconds")):
        target = re.search(r"CMakeFiles/([^/]+)\.dir/", file.as_posix())
        spent = re.findall(r"(\d+)m([\d.]+)s", file.read_text().splitlines()[1])
        if target and file.with_suffix("").exists():
            name = f"build of {target[1]}"
            sums[name] = sums.get(name, 0) + sum(60 * int(minutes) + float(rest) for minutes, rest in spent)
    return sums


def check(used: dict[str, float], file: Path = HERE / "budgets.tsv") -> Result:
    """Passed if all that has a budget kept to it; the message lists used and allowed."""
    try:
        allowed = {line["what"]: float(line["seconds"]) for line in tables.read(file)}
    except (OSError, KeyError, ValueError) as error:
        return Result("seconds", "", "budgets", FAILED, str(error))
    lines, fails = [], False
    for what, seconds in sorted(used.items(), key=lambda item: -item[1]):
        beyond = seconds > allowed.get(what, 0)
        fails |= beyond
        said = f": beyond it; make it cheaper, or raise {file.name} and say why in the commit" if beyond else ""
        lines.append(f"  {seconds:6.0f} of {allowed.get(what, 0):4.0f} s of CPU time: {what}{said}")
    return Result("seconds", "", "budgets", FAILED if fails else PASSED, "\n".join(lines))


def report(took: Iterable[Took]) -> str:
    """The slowest tests and the sums of each folder, as lines."""
    took = list(took)
    lines = [f"the {min(SLOWEST, len(took))} tests that take most CPU time:"]
    for test in sorted(took, key=lambda test: -test.cpu)[:SLOWEST]:
        lines.append(f"  {test.cpu:6.1f} s of CPU time, {test.wall:6.1f} s: {test.title}")
    lines.append("by folder:")
    for folder in sorted({test.folder for test in took}):
        there = [test for test in took if test.folder == folder]
        cpu, wall = sum(test.cpu for test in there), sum(test.wall for test in there)
        lines.append(f"  {cpu:6.0f} s of CPU time, {wall:6.0f} s: {len(there):4} tests in {folder}")
    return "\n".join(lines)
