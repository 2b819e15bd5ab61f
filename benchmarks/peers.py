"""Fetches the packages of peers.txt into build/peers, once: away from the Python that everything else runs in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "build" / "peers"


def installed() -> Path | None:
    """The folder with the packages, if they were fetched."""
    return FOLDER if (FOLDER / "complete").is_file() else None


def main() -> int:
    if installed():
        return 0
    shutil.rmtree(FOLDER, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    # DeepSpeed would look for a GPU to build operations for; it builds the one that it needs when it runs.
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    done = subprocess.run([*pip, "--target", FOLDER, "-r", HERE / "peers.txt"], env=environment)
    if done.returncode == 0:
        (FOLDER / "complete").touch()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
