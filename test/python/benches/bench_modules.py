"""The modules beside benchmarks/run.py, for tests."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
BUILD = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")
#: There is a test/run.py too.
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "run")


def imported(monkeypatch):
    """By name, while a test runs: what a fixture yields from."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name)
