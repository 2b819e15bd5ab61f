"""benchmarks/cpp/meters.h for Python programs."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch  # noqa: F401  it brings the libraries that this one needs

_ROOT = Path(__file__).resolve().parents[2]
_BUILD = _ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")


class Meters:
    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(_BUILD / "benchmarks" / "cpp" / "libmeters.so"))
        self._library.meters_bytes.restype = ctypes.c_int64
        self._library.meters_peak_bytes.restype = ctypes.c_int64

    def count_instructions(self) -> bool:
        return bool(self._library.meters_count_instructions())

    def start(self) -> None:
        self._library.meters_start()

    def zero(self) -> None:
        self._library.meters_zero()

    def dump(self, name: str) -> None:
        self._library.meters_dump(name.encode())

    def watch_memory(self) -> None:
        self._library.meters_watch_memory()

    def bytes(self) -> int:
        return int(self._library.meters_bytes())

    def peak_bytes(self) -> int:
        return int(self._library.meters_peak_bytes())

    def forget_peak(self) -> None:
        self._library.meters_forget_peak()
