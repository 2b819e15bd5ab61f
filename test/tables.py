"""The tables of tests: names of columns in the first line, then a row in each line, all separated by tabs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def read(path: Path) -> list[dict[str, str]]:
    columns, *lines = (line.split("\t") for line in path.read_text().splitlines())
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(columns):
            raise ValueError(f"{path.name}:{number}: there must be {len(columns)} columns, separated by tabs")
    return [dict(zip(columns, cells, strict=True)) for cells in lines]


def by_name(path: Path) -> dict[str, dict[str, str]]:
    """The rows by their first cells."""
    return {next(iter(row.values())): row for row in read(path)}


def put(path: Path, cells: list[str], order: Iterable[str]) -> None:
    """A row in the place of the one with the same first cell. Rows have this order."""
    known = {name: list(row.values()) for name, row in by_name(path).items()} | {cells[0]: cells}
    columns = path.read_text().splitlines()[0]
    path.write_text("\n".join([columns, *("\t".join(known[name]) for name in order if name in known), ""]))
