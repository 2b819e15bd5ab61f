"""What tests and compilers took: the slowest tests by the clock, and the budgets of CPU time (budgets.tsv).

Reports have the seconds of tests. The build leaves the compiler's CPU time beside each object (scripts/timed.sh). Only
CPU time is judged, since seconds depend on what else the machine does. CPU time depends on it too, where cores share
what they have: a budget has room for half as much again. Where most lines take more, the machine is slow, and every
line has as much more room.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

import tables
from check_rows import HERE
from reports import FAILED, PASSED, Result

SLOWEST = 20
#: What a line usually takes of its budget, and how many lines tell how fast a machine is.
USUAL = 2 / 3
ENOUGH = 5


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


def room(used: Mapping[str, float], allowed: Mapping[str, float]) -> float:
    """How many times its budget a line may take on this machine."""
    shares = [seconds / allowed[what] for what, seconds in used.items() if allowed.get(what)]
    return max(1.0, statistics.median(shares) / USUAL) if len(shares) >= ENOUGH else 1.0


def check(used: dict[str, float], file: Path = HERE / "budgets.tsv") -> Result:
    """Passed if all that has a budget kept to it; the message lists used and allowed."""
    try:
        allowed = {line["what"]: float(line["seconds"]) for line in tables.read(file)}
    except (OSError, KeyError, ValueError) as error:
        return Result("seconds", "", "budgets", FAILED, str(error))
    more = room(used, allowed)
    lines, fails = ([f"  a slow machine: {more:.2f} times as much is allowed"] if more > 1 else []), False
    for what, seconds in sorted(used.items(), key=lambda item: -item[1]):
        beyond = seconds > more * allowed.get(what, 0)
        fails |= beyond
        said = f": beyond it; make it cheaper, or raise {file.name} and say why in the commit" if beyond else ""
        lines.append(f"  {seconds:6.0f} of {allowed.get(what, 0):4.0f} s of CPU time: {what}{said}")
    return Result("seconds", "", "budgets", FAILED if fails else PASSED, "\n".join(lines))


def slowest(results: Iterable[Result]) -> str:
    """By the clock, as lines."""
    first = sorted(results, key=lambda result: -result.seconds)[:SLOWEST]
    lines = [f"  {result.seconds:6.1f} s: {result.suite}: {result.title}" for result in first]
    return "\n".join([f"the {len(lines)} slowest tests:", *lines])
