"""Where the checkout and what was built in it are, and programs that use the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import shardwise

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")
#: The folder that has the package.
PACKAGES = Path(shardwise.__file__).parents[1]


def python(*words: object, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Of this Python, which finds the package."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def output_of(*words: object, **options: str) -> str:
    """Of a program that must succeed."""
    done = python(*words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(ranks: int, *words: object, **variables: str) -> str:
    """The output of a program whose ranks must succeed."""
    return output_of("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words, **variables)
