"""Runs published trainers with torch's engine and with ours, and compares all bits; writes results.tsv and the page.

usage: compare.py [TRAINER ...]    without names: all of trainers.tsv

Packages come from the package index into environments of their own in build/trainers. They use the torch of the Python
that runs this, and this checkout's shardwise, by the variable SHARDWISE_INSTALL.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))
import tables
from programs import ROOT, last_lines, run_program
from reports import FAILED, PASSED, Result, counts

HERE = Path(__file__).resolve().parent
FOLDER = ROOT / "build" / "trainers"
PAGE = ROOT / "docs" / "trainers.md"
BEGIN, END = "<!-- make test-trainers writes what follows -->\n", "<!-- make test-trainers wrote what stands above -->"
SAME = "the same bits"
ENGINES = {"torch": "0", "shardwise": "1"}
SECONDS_OF_A_CASE = 600


@dataclass(frozen=True)
class Trainer:
    """A line of packages.tsv. Trainers whose packages agree share an environment."""

    name: str
    environment: str
    packages: list[str]
    #: Those whose metadata refuses this torch.
    without_dependencies: list[str]

    @property
    def folder(self) -> Path:
        return FOLDER / self.environment

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def version(self) -> str:
        return (self.without_dependencies or self.packages)[0].partition("==")[2]

    def prepare(self) -> None:
        """Makes the environment, and installs what it lacks. pip sees the torch that is there, and keeps it."""
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--upgrade-deps", str(self.folder)], check=True)
            (site,) = self.folder.glob("lib/python*/site-packages")
            folders = (Path(torch.__file__).parent.parent, ROOT / "python")
            lines = [f"import site; site.addsitedir({str(folder)!r})\n" for folder in folders]
            (site / "beside.pth").write_text("".join(lines))
        constraint = FOLDER / "torch.txt"
        constraint.write_text(f"torch=={version('torch')}\n")
        pip = [self.python, "-m", "pip", "install", "--quiet", "--constraint", constraint]
        subprocess.run([*pip, *self.packages], check=True)
        if self.without_dependencies:
            subprocess.run([*pip, "--no-deps", *self.without_dependencies], check=True)


def known_trainers() -> dict[str, Trainer]:
    rows = [list(row.values()) for row in tables.read(HERE / "packages.tsv")]
    return {row[0]: Trainer(row[0], row[1], row[2].split(), row[3].split()) for row in rows}


def run(trainer: Trainer, ranks: str, engine: str, cases: Sequence[str]) -> None:
    """Leaves a file for each case that passes, and rank."""
    out, log = FOLDER / f"{trainer.name}.{engine}", FOLDER / f"{trainer.name}.{engine}.{ranks}.log"
    for old in [log, *(path for case in cases for path in FOLDER.glob(f"{out.name}.{case}.*"))]:
        old.unlink(missing_ok=True)
    command = [str(trainer.python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    dropped = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | {
        "SHARDWISE_INSTALL": ENGINES[engine], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled",
    }  # fmt: skip
    command += [f"run_{trainer.name}.py", str(out), *cases]
    problem, _ = run_program(command, log, SECONDS_OF_A_CASE * len(cases), HERE, environment)
    if problem:
        print(f"{trainer.name} with {engine}'s engine: {problem}\n{last_lines(log, 60)}", flush=True)


def compared(trainer: str, case: str, ranks: int) -> str:
    """What differs between the two runs of a case; empty if nothing does."""
    for rank in range(ranks):
        files = [FOLDER / f"{trainer}.{engine}.{case}.{rank}" for engine in ENGINES]
        if missing := [file.name for file in files if not file.exists()]:
            return f"left no {' and no '.join(missing)}"
        theirs, ours = (torch.load(file) for file in files)
        if [theirs["engines"], ours["engines"]] != [["torch"], ["shardwise"]]:
            return f"engines were {theirs['engines']} and {ours['engines']}"
        if not 0 < len(theirs["steps"]) == len(ours["steps"]):
            return f"{len(theirs['steps'])} and {len(ours['steps'])} steps"
        if theirs["tensors"].keys() != ours["tensors"].keys():
            return "tensors have other names"
        pairs = {
            f"value {number}": pair for number, pair in enumerate(zip(theirs["steps"], ours["steps"], strict=True))
        }
        pairs |= {name: (theirs["tensors"][name], ours["tensors"][name]) for name in theirs["tensors"]}
        differing = [name for name, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(a, b)]
        if differing:
            return f"rank {rank}: {len(differing)} of {len(pairs)} differ, first {differing[0]}"
    return ""


def title(row: dict[str, str]) -> str:
    return f"{row['trainer']}: {row['case']}"


def write_page(page: Path) -> None:
    """Puts a table of all cases, with what their last runs found, between the page's two marks."""
    lines = ["| trainer | ranks | what | result |", "|---|---|---|---|"]
    results = tables.by_name(HERE / "results.tsv")
    for row in tables.read(HERE / "trainers.tsv"):
        if found := results.get(title(row)):
            name = f"{row['trainer']} {found['version']}"
            lines.append(f"| {name} | {row['ranks']} | {row['what']} | {found['result']} ({found['day']}) |")
    text = page.read_text()
    page.write_text(text.split(BEGIN)[0] + BEGIN + "\n".join(lines) + "\n" + END + text.split(END)[1])


def main() -> int:
    known = known_trainers()
    chosen = sys.argv[1:] or list(known)
    if unknown := set(chosen) - set(known):
        sys.exit(f"no trainer of test/trainers/packages.tsv: {', '.join(sorted(unknown))}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    table = tables.read(HERE / "trainers.tsv")
    results = []
    for name in chosen:
        known[name].prepare()
    for trainer, ranks in itertools.product(chosen, ("2", "4")):
        rows = [row for row in table if (row["trainer"], row["ranks"]) == (trainer, ranks)]
        for engine in ENGINES if rows else ():
            run(known[trainer], ranks, engine, [row["case"] for row in rows])
        for row in rows:
            found = compared(trainer, row["case"], int(ranks))
            print(f"{title(row)}: {found or SAME}", flush=True)
            results.append(Result("trainers", trainer, row["case"], FAILED if found else PASSED, found))
            line = [title(row), known[trainer].version, torch.__version__.partition("+")[0]]
            line += [time.strftime("%Y-%m-%d"), found or SAME]
            tables.put(HERE / "results.tsv", line, map(title, table))
    write_page(PAGE)
    print(counts(results))
    return int(any(result.outcome == FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
