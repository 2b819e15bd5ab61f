"""Which pieces of a file a rank trains on in a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_MASK = 2**64 - 1


@dataclass(frozen=True)
class Batch:
    """[sequences, context] bytes as int64, and for each the byte that follows it."""

    input: Tensor
    target: Tensor


class Batches:
    """Pieces of a file. Which pieces depends on the seed, the step and the rank alone, so that any process can draw the
    batch of any rank. examples/cpp/batches.h draws the same.
    """

    def __init__(self, file: Path, seed: int, sequences: int, context: int) -> None:
        text = bytearray(file.read_bytes())
        if len(text) <= context:
            raise ValueError(
                f"gpt: the corpus {file} has {len(text)} bytes; it needs more than {context}, the length of a sequence."
            )
        self._text = torch.frombuffer(text, dtype=torch.uint8)
        self._seed = seed
        self._sequences = sequences
        self._context = context

    def draw(self, step: int, rank: int, device: torch.device) -> Batch:
        starts = [self._offset(step, rank, sequence) for sequence in range(self._sequences)]
        rows = torch.stack([self._text[start : start + self._context + 1] for start in starts])
        rows = rows.to(torch.int64).to(device)
        return Batch(rows[:, :-1], rows[:, 1:])

    def _offset(self, step: int, rank: int, sequence: int) -> int:
        hashed = _mix(self._seed)
        for part in (step, rank, sequence):
            hashed = _mix(hashed ^ part)
        return hashed % (len(self._text) - self._context)


def _mix(x: int) -> int:
    """One round of the splitmix64 generator."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
