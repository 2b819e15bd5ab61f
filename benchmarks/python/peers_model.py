"""Ranks that are not there: collectives move nothing and are over when a modelled wire would be done.

benchmarks/cpp/wire.h has the model. It does not know what else a network or a collective's kernels would take.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch.distributed as dist

_ROOT = Path(__file__).resolve().parents[2]
_BUILD = _ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")


class ModelledPeers:
    """A back end of torch.distributed; all its process groups share one wire."""

    name = "modelled"

    def __init__(self, device: str) -> None:
        sys.path.append(str(_BUILD / "benchmarks" / "cpp"))
        self._wire = importlib.import_module("modelled_peers").Wire(device)
        dist.Backend.register_backend(
            self.name, lambda store, rank, size, timeout: self._wire.peers(rank, size), devices=["cpu", "cuda"]
        )

    def set_speed(self, microseconds: float, megabytes: float) -> None:
        """Latency, and bandwidth a second; no bandwidth: as many bytes at once as there are."""
        self._wire.set_speed(microseconds, megabytes)

    def busy_seconds(self) -> float:
        return float(self._wire.busy_seconds())
