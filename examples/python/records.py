"""What one rank says of one step, and the file it says it in."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Record:
    step: int
    loss: float
    tokens_per_second: float
    rss_mib: float
    #: What torch holds of an accelerator's memory; 0 on a CPU.
    device_mib: float

    @property
    def memory_mib(self) -> float:
        """The memory that training fills: the accelerator's where there is one."""
        return self.device_mib or self.rss_mib


def resident_mib() -> float:
    """The memory of this process that is really there, torch's own code included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / _MEBIBYTE


def device_mib(device: torch.device) -> float:
    return 0.0 if device.type == "cpu" else torch.cuda.memory_reserved(device) / _MEBIBYTE


class Records:
    """A file of records, one JSON object a line."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w")

    def write(self, record: Record) -> None:
        values = {name: value for name, value in vars(record).items() if name != "device_mib" or value}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
