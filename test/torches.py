"""Builds and tests with several versions of torch, one after the other, and writes torches.tsv.

usage: torches.py [VERSION ...] [--suites NAME ...]    without versions: each of cmake/torch_versions.txt

Each version has a folder build/torches/VERSION with a copy of the sources, a .venv and a build of its own, which stay:
the next run goes on there. It runs what `make test ROWS=1` runs of these suites. What ran before is added to the
closing line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import tables
from check_rows import HERE
from programs import ROOT, copy_sources, current_commit
from reports import FAILED, read_counts, results_of, write_closing_line
from suites import MINUTES, OUT

sys.path.append(str(ROOT / "scripts"))
from probe_python import torch_versions

FOLDER = ROOT / "build" / "torches"
TABLE = HERE / "torches.tsv"
SUITES = ("rank_tests", "python_ranks", "python_interop", "python_unit")


def test(version: str, suites: Sequence[str]) -> str:
    """Runs them, and returns the closing line; that of a failure, if there is none."""
    folder = FOLDER / version
    copy_sources(folder)
    closing_line = folder / "build" / "test" / "closing_line"
    closing_line.unlink(missing_ok=True)
    # What the make around this one was given is not for that one.
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "SHARDWISE_PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    command = ["make", "-C", str(folder), "test", f"TORCH={version}", "ROWS=1", f"SUITES={' '.join(suites)}"]
    ended = subprocess.run(command, env=environment).returncode
    text = closing_line.read_text().strip() if closing_line.exists() else ""
    return text if text and (ended == 0 or read_counts(text)[FAILED]) else "0 passed, 1 failed, 0 skipped"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--suites", nargs="+", default=SUITES)
    arguments = parser.parse_args()
    if unknown := set(arguments.versions) - set(torch_versions()):
        parser.error(f"no version of cmake/torch_versions.txt: {', '.join(sorted(unknown))}")
    results = []
    for version in [each for each in torch_versions() if each in (arguments.versions or torch_versions())]:
        began = time.monotonic()
        commit = current_commit()
        print(f"torch {version}: in {(FOLDER / version).relative_to(ROOT)}", flush=True)
        result = test(version, arguments.suites)
        minutes = f"{(time.monotonic() - began) / MINUTES:.1f}"
        print(f"torch {version}: {result} in {minutes} minutes", flush=True)
        results += results_of(f"torch {version}", result)
        row = [version, commit, time.strftime("%Y-%m-%d"), minutes, " ".join(arguments.suites), result]
        tables.put(TABLE, row, torch_versions())
    OUT.mkdir(parents=True, exist_ok=True)
    write_closing_line(OUT / "closing_line", results, adds=True)
    return int(any(result.outcome == FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
