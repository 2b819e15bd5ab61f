"""benchmarks/cpp/meters.h for Python programs."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch  # noqa: F401  it brings the libraries that this one needs

from shardwise import _C

_ROOT = Path(__file__).resolve().parents[2]
_BUILD = _ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")


def status_mib(name: str) -> float:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Meters:
    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(_BUILD / "benchmarks" / "cpp" / "libmeters.so"))
        self._library.meters_bytes.restype = ctypes.c_int64
        self._library.meters_peak_bytes.restype = ctypes.c_int64
        self._library.meters_allocations.restype = ctypes.c_int64

    def count_instructions(self) -> bool:
        return bool(self._library.meters_count_instructions())

    def start(self) -> None:
        self._library.meters_start()

    def stop(self) -> None:
        self._library.meters_stop()

    def zero(self) -> None:
        self._library.meters_zero()

    def dump(self, name: str) -> None:
        self._library.meters_dump(name.encode())

    def watch_memory(self) -> None:
        self._library.meters_watch_memory()
        add = ctypes.cast(self._library.meters_add_memory, ctypes.c_void_p).value
        assert add is not None
        _C.set_shared_memory_listener(add)

    def bytes(self) -> int:
        return int(self._library.meters_bytes())

    def peak_bytes(self) -> int:
        return int(self._library.meters_peak_bytes())

    def forget_peak(self) -> None:
        self._library.meters_forget_peak()

    def allocations(self) -> int:
        return int(self._library.meters_allocations())
