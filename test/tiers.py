"""Which tests `make test` leaves to `.ci/run`: those of ci.tsv, each with the reason why a change seldom needs it.

A line names a test by its title, with or without parameters, or by how titles begin, with a * at the end.
SHARDWISE_TEST_TIER chooses for pytest: `change` runs what `make test` runs, `ci` the rest; without it all run.
"""

from __future__ import annotations

from pathlib import Path

from check_rows import read_table

TABLE = Path(__file__).resolve().parent / "ci.tsv"


def names(python: bool) -> list[str]:
    """Those of the table in C++ or in Python, where the names of tests begin with their kind."""
    lines = [line["test"] for line in read_table(TABLE, ["test", "reason"])]
    return [name for name in lines if name.startswith(("Test", "test_")) == python]


def is_among(title: str, names: list[str]) -> bool:
    forms = (title, title.split("[")[0])
    return any(name in forms or (name.endswith("*") and title.startswith(name[:-1])) for name in names)
