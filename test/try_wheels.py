"""Installs wheels of dist/ as a user would, uses them (python/unit/first_use.py), and writes wheels.tsv.

usage: try_wheels.py [PYTHON ...] [--beside FOLDER]    such as python3.13; without any, this one

Each wheel gets a new environment. pip fetches its torch (5 GB), or it is taken from a folder with packages, in whose
name {} stands for the version of the Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tables
from check_rows import HERE
from programs import ROOT

sys.path.append(str(HERE / "python" / "unit"))
import first_use
from installation import Environment

TABLE = HERE / "wheels.tsv"
VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__.partition('+')[0])"


def try_wheel(environment: Environment, wheel: Path, fetches: bool) -> tuple[int, str]:
    """The seconds from pip to the demo's picture, and what came out."""
    began, seconds = time.monotonic(), 0
    try:
        if fetches:
            environment.run(environment.python, "-m", "pip", "install", wheel)
        else:
            environment.pip_install(wheel)
        first_use.demo(environment)
        seconds = round(time.monotonic() - began)
        for step in first_use.STEPS:
            step(environment)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(error)
        return seconds, "failed"
    return seconds, "passed"


def version_of(python: str) -> str:
    show = "import sys; print('{}.{}'.format(*sys.version_info))"
    return subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", default=[sys.executable])
    parser.add_argument("--beside", metavar="FOLDER", default="")
    arguments = parser.parse_args()
    results = []
    for python in arguments.pythons:
        version = version_of(python)
        for wheel in sorted((ROOT / "dist").glob(f"*-cp{version.replace('.', '')}-*.whl")):
            with tempfile.TemporaryDirectory() as folder:
                beside = Path(arguments.beside.format(version)) if arguments.beside else None
                environment = Environment.create(Path(folder), python, beside)
                seconds, result = try_wheel(environment, wheel, fetches=beside is None)
                exact, torch = environment.run(environment.python, "-W", "ignore", "-c", VERSIONS).split()
            size, came = f"{wheel.stat().st_size / 2**20:.1f}", "a folder" if beside else "the index"
            row = [wheel.name, size, exact, torch, came, str(seconds), time.strftime("%Y-%m-%d"), result]
            tables.put(TABLE, row, sorted({wheel.name, *tables.by_name(TABLE)}))
            print("  ".join(row), flush=True)
            results.append(result)
    if not results:
        sys.exit("shardwise: dist/ has no wheel for these Pythons: make wheels PYTHONS=...")
    return int(set(results) != {"passed"})


if __name__ == "__main__":
    sys.exit(main())
