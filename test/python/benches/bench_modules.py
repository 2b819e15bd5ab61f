"""Where the benchmarks are; with this file their modules can be imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
BUILD = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "python")]
