"""What a benchmark found: figures with units, and the files that they are kept in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


def save(folder: Path, facts: dict[str, str], figures: Sequence[Figure]) -> list[Path]:
    """Two files named after date, commit and suites: JSON for programs, a table for people."""
    suites = dict.fromkeys(figure.suite for figure in figures)
    stem = folder / "-".join([facts["date"][:10], facts["commit"], *suites])
    data, table = stem.with_suffix(".json"), stem.with_suffix(".md")
    data.write_text(json.dumps({"facts": facts, "figures": [asdict(figure) for figure in figures]}, indent=1) + "\n")
    lines = ["# Benchmarks", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| suite | figure | value | unit | beside |", "|---|---|---:|---|---|"]
    lines += [f"| {f.suite} | {f.name} | {shown(f.value)} | {f.unit} | {f.note} |" for f in figures]
    table.write_text("\n".join(lines) + "\n")
    return [data, table]
