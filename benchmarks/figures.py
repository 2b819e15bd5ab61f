"""What a benchmark found: figures with units, and the files that they are kept in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One number. `note` says what it is compared with."""

    suite: str
    name: str
    value: float
    unit: str
    note: str = ""

    def line(self) -> str:
        text = f"{self.suite}  {self.name:50}  {shown(self.value):>9}  {self.unit}"
        return f"{text}  ({self.note})" if self.note else text


def shown(value: float) -> str:
    """With three significant digits, and all those before the point."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


@dataclass(frozen=True)
class Saved:
    """The figures of a suite, and where and when they come from."""

    figures: tuple[Figure, ...]
    facts: Mapping[str, str]

    def find(self, name: str, unit: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name and figure.unit == unit), None)


def save(folder: Path, facts: Mapping[str, str], figures: Sequence[Figure]) -> list[Path]:
    """A file for each suite, in place of the one from before, with a line for each figure."""
    paths = []
    for suite in dict.fromkeys(figure.suite for figure in figures):
        rows = [json.dumps([f.name, f.value, f.unit, f.note]) for f in figures if f.suite == suite]
        paths.append(folder / f"{suite}.json")
        listed = ",\n".join(rows)
        paths[-1].write_text(f'{{"facts": {json.dumps(facts, indent=1)},\n"figures": [\n{listed}\n]}}\n')
    return paths


def load(folder: Path) -> dict[str, Saved]:
    """What save() wrote there, by suite."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        found[path.stem] = Saved(tuple(Figure(path.stem, *row) for row in data["figures"]), data["facts"])
    return found
