"""Tells the seconds of each test, as the C++ suites do (test/seconds.py reads them), and may run the rows alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process, of all that came of it and live, and of those that these have waited for."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name of the program comes in brackets, and may have anything in it.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(folder.name)
        children.setdefault(int(fields[1]), []).append(number)
        ticks[number] = sum(map(int, fields[11:15]))
    total, waiting = 0, [os.getpid()]
    while waiting:
        number = waiting.pop()
        total += ticks.get(number, 0)
        waiting += children.get(number, [])
    return total / TICKS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With SHARDWISE_TEST_ROWS, leaves only the tests that rows.tsv names."""
    if "SHARDWISE_TEST_ROWS" not in os.environ:
        return
    sys.path.append(str(Path(__file__).parent.parent))
    import check_rows

    rows = {row.title for row in check_rows.read_rows(check_rows.HERE / "rows.tsv") if row.language == "py"}

    def is_row(item: pytest.Item) -> bool:
        parent = item.getparent(pytest.Class)
        return parent is not None and f"{parent.name}::{item.name.partition('[')[0]}" in rows

    config.hook.pytest_deselected(items=[item for item in items if not is_row(item)])
    items[:] = [item for item in items if is_row(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    path = os.environ.get("SHARDWISE_TEST_SECONDS")
    if path is None:
        return (yield)
    began, before = time.monotonic(), cpu_seconds()
    result = yield
    wall, cpu = time.monotonic() - began, cpu_seconds() - before
    title = ".".join(part for part in item.nodeid.split("::")[1:])
    with open(path, "a") as file:
        # What a process took that nobody waited for is lost.
        file.write(f"{title}\t{item.path}\t{wall:.3f}\t{max(cpu, 0):.3f}\n")
    return result
