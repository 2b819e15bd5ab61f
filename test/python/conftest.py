"""Tells the seconds of each test, as the C++ suites do (test/seconds.py reads them), and chooses rows or a tier."""

from __future__ import annotations

import os
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
    """With SHARDWISE_TEST_ROWS, leaves only the tests of rows.tsv; with SHARDWISE_TEST_TIER, those of a tier."""
    rows_alone, tier = "SHARDWISE_TEST_ROWS" in os.environ, os.environ.get("SHARDWISE_TEST_TIER")
    if not rows_alone and tier is None:
        return
    from check_rows import HERE, read_rows
    from suites import ci_names, is_among

    rows = {row.title for row in read_rows(HERE / "rows.tsv") if row.language == "py"}
    of_ci = ci_names(python=True)

    def is_chosen(item: pytest.Item) -> bool:
        title = title_of(item)
        if rows_alone:
            return title.partition("[")[0].replace(".", "::") in rows
        return is_among(title, of_ci) == (tier == "ci")

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = [item for item in items if is_chosen(item)]


def title_of(item: pytest.Item) -> str:
    return ".".join(item.nodeid.split("::")[1:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    path = os.environ.get("SHARDWISE_TEST_SECONDS")
    if path is None:
        return (yield)
    began, before = time.monotonic(), cpu_seconds()
    result = yield
    wall, cpu = time.monotonic() - began, cpu_seconds() - before
    with open(path, "a") as file:
        # What a process took that nobody waited for is lost.
        file.write(f"{title_of(item)}\t{item.path}\t{wall:.3f}\t{max(cpu, 0):.3f}\n")
    return result
