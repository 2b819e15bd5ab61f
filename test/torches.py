"""Builds and tests with several versions of torch, one after the other, and writes torches.tsv.

usage: torches.py [VERSION ...] [--suites NAME ...]    without versions: each of cmake/torch_versions.txt

Each version has a folder build/torches/VERSION with a copy of the sources, a .venv and a build of its own, which stay:
the next run goes on there. It runs what `make test ROWS=1` runs of these suites.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import parts
from check_rows import TableError, read_table
from reports import FAILED, PASSED, SKIPPED, counts, read_counts
from suites import MINUTES, OUT, ROOT

sys.path.append(str(ROOT / "scripts"))
from probe_python import torch_versions

FOLDER = ROOT / "build" / "torches"
TABLE = Path(__file__).resolve().parent / "torches.tsv"
COLUMNS = ["torch", "commit", "date", "minutes", "suites", "result"]
SUITES = ("rank_tests", "python_ranks", "python_interop", "python_unit")


def copy_sources(folder: Path) -> None:
    """Makes the folder's sources those of this checkout; a file that is the same keeps its time, for the build."""
    listed = parts.git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    wanted = {name for name in listed if name and (ROOT / name).is_file()}
    listing = folder / ".sources"
    before = set(listing.read_text().split("\0")) if listing.exists() else set()
    for name in before - wanted:
        (folder / name).unlink(missing_ok=True)
    for name in wanted:
        source, target = ROOT / name, folder / name
        if target.exists() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    listing.write_text("\0".join(sorted(wanted)))


def test(version: str, suites: Sequence[str]) -> str:
    """Runs them, and returns the closing line; that of a failure, if there is none."""
    folder = FOLDER / version
    folder.mkdir(parents=True, exist_ok=True)
    copy_sources(folder)
    closing_line = folder / "build" / "test" / "closing_line"
    closing_line.unlink(missing_ok=True)
    # What the make around this one was given is not for that one.
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "SHARDWISE_PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    command = ["make", "-C", str(folder), "test", f"TORCH={version}", "ROWS=1", f"SUITES={' '.join(suites)}"]
    ended = subprocess.run(command, env=environment).returncode
    text = closing_line.read_text().strip() if closing_line.exists() else "0 passed, 1 failed, 0 skipped"
    return text if ended == 0 or read_counts(text)[FAILED] else "0 passed, 1 failed, 0 skipped"


def write(rows: dict[str, dict[str, str]]) -> None:
    lines = [COLUMNS, *([rows[each][column] for column in COLUMNS] for each in torch_versions() if each in rows)]
    TABLE.write_text("".join("\t".join(line) + "\n" for line in lines))


def known() -> dict[str, dict[str, str]]:
    try:
        return {row["torch"]: row for row in read_table(TABLE, COLUMNS)}
    except (OSError, TableError):
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument("--add", action="store_true", help="add what ran before to the closing line")
    arguments = parser.parse_args()
    if unknown := set(arguments.versions) - set(torch_versions()):
        parser.error(f"no version of cmake/torch_versions.txt: {', '.join(sorted(unknown))}")
    closing_line = OUT / "closing_line"
    before = read_counts(closing_line.read_text()) if arguments.add and closing_line.exists() else {}
    total = dict.fromkeys((PASSED, FAILED, SKIPPED), 0)
    for version in [each for each in torch_versions() if each in (arguments.versions or torch_versions())]:
        began = time.monotonic()
        commit = parts.current_commit()
        print(f"torch {version}: in {(FOLDER / version).relative_to(ROOT)}", flush=True)
        result = test(version, arguments.suites)
        minutes = f"{(time.monotonic() - began) / MINUTES:.1f}"
        print(f"torch {version}: {result} in {minutes} minutes", flush=True)
        total = {outcome: number + read_counts(result)[outcome] for outcome, number in total.items()}
        row = [version, commit, time.strftime("%Y-%m-%d"), minutes, " ".join(arguments.suites), result]
        write({**known(), version: dict(zip(COLUMNS, row, strict=True))})
    OUT.mkdir(parents=True, exist_ok=True)
    closing_line.write_text(f"{counts([], {name: number + before.get(name, 0) for name, number in total.items()})}\n")
    print(closing_line.read_text(), end="", flush=True)
    return int(bool(total[FAILED]))


if __name__ == "__main__":
    sys.exit(main())
