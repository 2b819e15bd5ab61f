"""Chooses rows or a tier of the tests, and ends their ranks."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver

import pytest


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


def pytest_sessionfinish() -> None:
    """Ends the ranks, and the server that made them, so that their CPU time is counted (test/programs.py)."""
    for rank in multiprocessing.active_children():
        rank.kill()
        rank.join()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
