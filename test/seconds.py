"""What each test took: the slowest, the sums by folder, and which take more than a test without a mark may.

A suite adds a line to its file for each test: title, source file, seconds, seconds of CPU time. Only CPU time is
judged: seconds depend on what else the machine does. A test that needs more than LIMIT stands in slow.tsv, with the
reason. CPU time depends on the machine too, and where cores share what they have, on what runs beside: the same test
was seen to take 1.7 times as much. So a test without a mark is told of from LIMIT on, and fails the run from twice
that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from check_rows import TableError, read_table
from reports import FAILED, PASSED, Result

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMIT = 5.0
SLOWEST = 20
COLUMNS = ["test", "reason"]


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


def without_parameters(title: str) -> str:
    return title.split("[")[0]


def check(took: Iterable[Took], file: Path = HERE / "slow.tsv", limit: float = LIMIT) -> Result:
    """Passed if every test that takes long has a mark."""
    took = list(took)
    try:
        marked = {line["test"] for line in read_table(file, COLUMNS)}
    except (OSError, TableError) as error:
        return Result("seconds", "", "slow tests are marked", FAILED, str(error))
    unmarked = [test for test in took if test.cpu > limit and without_parameters(test.title) not in marked]
    problems = [
        f"{test.title} of {test.suite} took {test.cpu:.1f} s of CPU time, and {limit:g} s are the limit: make it "
        f"cheaper, or name it in {file.name} with the reason"
        for test in unmarked
    ]
    # Caches that others use, and cores that are halves of one, make CPU time longer too.
    fails = any(test.cpu > 4 * limit for test in unmarked)
    return Result("seconds", "", "slow tests are marked", FAILED if fails else PASSED, "\n".join(problems))


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
