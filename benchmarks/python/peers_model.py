"""Ranks that are not there: collectives move nothing, and are over when a modelled wire would be done, or at once.

benchmarks/cpp/wire.h has the model. It does not know what else a network or a collective's kernels would take.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

_ROOT = Path(__file__).resolve().parents[2]
_BUILD = _ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")


def _library() -> Any:
    sys.path.append(str(_BUILD / "benchmarks" / "cpp"))
    return importlib.import_module("modelled_peers")


class InstantPeers:
    """A back end of torch.distributed whose collectives are done when they are called."""

    name = "instant"

    def __init__(self) -> None:
        self._library = _library()
        self._made: list[Any] = []
        dist.Backend.register_backend(self.name, self._make, devices=["cpu"])

    def _make(self, _store: dist.Store, rank: int, size: int, _timeout: object) -> Any:
        self._made.append(self._library.instant(rank, size))
        return self._made[-1]

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Meanwhile comparisons of the ranks find them alike."""
        self._set_answers(True)
        yield
        self._set_answers(False)

    def _set_answers(self, answers: bool) -> None:
        for backend in self._made:
            self._library.set_answers(backend, answers)


class ModelledPeers:
    """A back end of torch.distributed; all its process groups share one wire."""

    name = "modelled"

    def __init__(self, device: str) -> None:
        self._wire = _library().Wire(device)
        dist.Backend.register_backend(
            self.name, lambda store, rank, size, timeout: self._wire.peers(rank, size), devices=["cpu", "cuda"]
        )

    def set_speed(self, microseconds: float, megabytes: float) -> None:
        """Latency, and bandwidth a second; no bandwidth: as many bytes at once as there are."""
        self._wire.set_speed(microseconds, megabytes)

    def busy_seconds(self) -> float:
        return float(self._wire.busy_seconds())
