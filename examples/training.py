"""What a run of the demo left behind: the facts of the run and every rank's records."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, float]


class DemoError(Exception):
    """The demo did not do what it should; the text says what."""


@dataclass(frozen=True)
class Facts:
    ranks: int
    parameters: int
    context: int
    batch: int
    device: str
    mode: str = "replicate"


@dataclass(frozen=True)
class Memory:
    """What one rank holds of tensors between two steps, and the most in a step, in MiB. Measured."""

    parameters: float
    gradients: float
    optimizer: float
    all: float
    peak: float

    @property
    def other(self) -> float:
        """Buffers of collectives, and what else there is."""
        return self.all - self.parameters - self.gradients - self.optimizer


@dataclass(frozen=True)
class Training:
    facts: Facts
    #: By rank, then by step.
    records: list[list[Record]]

    @property
    def mean_losses(self) -> list[float]:
        return [sum(step["loss"] for step in steps) / len(steps) for steps in zip(*self.records, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together, over the whole run."""
        tokens = self.facts.batch * self.facts.context
        return sum(
            tokens * len(rank) / sum(tokens / record["tokens_per_second"] for record in rank) for rank in self.records
        )


def read_training(folder: Path, ranks: int, steps: int) -> Training:
    facts = Facts(**_parsed(folder / "run.json")[0])
    if facts.ranks != ranks:
        raise DemoError(f"demo: {ranks} ranks were started, but the training saw {facts.ranks}.")
    return Training(facts, [read_records(folder / f"rank{rank}.jsonl", steps) for rank in range(ranks)])


def read_memory(folder: Path) -> Memory:
    return Memory(**_parsed(folder / "memory.json")[0])


def read_records(file: Path, steps: int) -> list[Record]:
    records = _parsed(file)
    if [record["step"] for record in records] != list(range(1, steps + 1)):
        raise DemoError(f"demo: {file} has {len(records)} records; there must be one for each step from 1 to {steps}.")
    return records


def largest_difference(losses: list[float], reference: list[float]) -> tuple[float, int]:
    """The largest relative difference and its step. A loss that is not a number differs infinitely."""
    differences = [abs(loss - other) / abs(other) for loss, other in zip(losses, reference, strict=True)]
    differences = [difference if math.isfinite(difference) else math.inf for difference in differences]
    largest = max(differences)
    return largest, differences.index(largest) + 1


def _parsed(file: Path) -> list[Any]:
    try:
        return [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise DemoError(f"demo: {file} is not what a rank writes: {error}") from error
