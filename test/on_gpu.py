"""What a machine with a GPU should show of shardwise, in steps that take eight minutes at most.

usage: on_gpu.py [STEP ...] [--device cuda|late] [--again] [--list] [--only FILTER] [--folder FOLDER]

Without steps it runs all of them that are not done, in this order; a name stands for all steps that begin so. Each
writes a log and FOLDER/STEP.json (default: build/gpu/DEVICE): what came of it, machine, GPU, driver, versions, commit
and date. A step that has passed with this commit, torch and GPU is done: it is run again with --again only. What is
missing on this machine is named, and fails nothing. With --device late test/late_device stands in for the GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from on_gpu_steps import LIMIT, STEPS, Outcome, Place, Step
from programs import last_lines
from reports import FAILED, PASSED
from suites import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import machine

#: A result counts as long as these are the same.
COUNTS_FOR = ("commit", "torch", "GPU")


@dataclass(frozen=True)
class Done:
    """What a step's file says."""

    step: str
    outcome: Outcome
    seconds: float
    facts: dict[str, str]

    @classmethod
    def read(cls, file: Path) -> Done | None:
        try:
            found = json.loads(file.read_text())
            outcome = Outcome(found["result"], found["said"])
            return cls(found["step"], outcome, found["seconds"], found["facts"])
        except (OSError, ValueError, KeyError):  # none, or one that breaks off
            return None

    def write(self, file: Path) -> None:
        shown = {"step": self.step, "result": self.outcome.result, "said": self.outcome.said}
        text = json.dumps({**shown, "seconds": round(self.seconds, 1), "facts": self.facts}, indent=1)
        # A run that is ended meanwhile leaves what was there.
        written = file.with_suffix(".new")
        written.write_text(text + "\n")
        written.replace(file)

    def counts_for(self, facts: dict[str, str]) -> bool:
        same = all(self.facts.get(name) == facts.get(name) for name in COUNTS_FOR)
        return self.outcome.result == PASSED and same


def facts_of(device: str) -> dict[str, str]:
    code = "import torch; print(torch.version.cuda, '.'.join(map(str, torch.cuda.nccl.version())))"
    try:
        words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        words = ["none", "none"]
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    gpu, _, driver = machine.first_line(*query).partition(", ")
    of_gpu = {"GPU": gpu, "driver": driver or "none", "CUDA of torch": words[0], "NCCL": words[1]}
    return {**machine.facts(), **of_gpu, "nvcc": compiler_of_cuda(), "device": device}


def compiler_of_cuda() -> str:
    try:
        said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "none on the path"
    return said.strip().splitlines()[-1]


def run_step(step: Step, place: Place, facts: dict[str, str]) -> Done:
    place.log.unlink(missing_ok=True)
    begin = time.monotonic()
    try:
        outcome = step.run(place)
    except Exception as error:
        outcome = Outcome(FAILED, f"{type(error).__name__}: {error}")
    done = Done(step.name, outcome, time.monotonic() - begin, facts)
    done.write(place.result)
    return done


def chosen(names: Sequence[str], steps: Sequence[Step]) -> list[Step]:
    unknown = [name for name in names if not any(step.name.startswith(name) for step in steps)]
    if unknown:
        sys.exit(f"on_gpu: there is no step {', '.join(unknown)}. There are: {', '.join(step.name for step in steps)}.")
    return [step for step in steps if not names or any(step.name.startswith(name) for name in names)]


def table(found: Sequence[tuple[str, Done | None]]) -> str:
    width = max(len(name) for name, _ in found)
    lines = [f"{'step':{width}}  {'result':7}  seconds"]
    for name, done in found:
        result, seconds, said = "not run", "", ""
        if done is not None:
            result, seconds, said = done.outcome.result, f"{done.seconds:.0f}", done.outcome.said.partition("\n")[0]
        lines.append(f"{name:{width}}  {result:7}  {seconds:>7}  {said}".rstrip())
    return "\n".join(lines)


def main(words: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--device", choices=("cuda", "late"), default="cuda")
    parser.add_argument("--again", action="store_true", help="also those that are done")
    parser.add_argument("--list", action="store_true", help="what there is and what came of it; runs nothing")
    parser.add_argument("--only", default="*", help="of tests in C++: a filter of GoogleTest's")
    parser.add_argument("--folder", type=Path, help="for results and logs")
    arguments = parser.parse_args(words)
    folder = arguments.folder or ROOT / "build" / "gpu" / arguments.device
    folder.mkdir(parents=True, exist_ok=True)
    facts = facts_of(arguments.device)
    found: list[tuple[str, Done | None]] = []
    failed = False
    picked = chosen(arguments.steps, steps)
    for step in steps if arguments.list else picked:
        place = Place(step.name, arguments.device, folder, arguments.only)
        done = Done.read(place.result)
        if arguments.list:
            print(f"{step.name}: {step.about}")
        elif arguments.again or done is None or not done.counts_for(facts):
            print(f"{step.name}: running, for {LIMIT} s at most; its output goes to {place.log}", flush=True)
            done = run_step(step, place, facts)
            print(f"{step.name}: {done.outcome.result} in {done.seconds:.0f} s: {done.outcome.said}", flush=True)
            if done.outcome.result == FAILED:
                print(last_lines(place.log, 30), flush=True)
        else:
            print(f"{step.name}: has passed on {done.facts['date']}; --again (AGAIN=1) runs it again", flush=True)
        failed = failed or (done is not None and done.outcome.result == FAILED and not arguments.list)
        found.append((step.name, done))
    print(
        f"\n{', '.join(f'{name}: {facts[name]}' for name in ('machine', 'GPU', 'driver', 'torch', 'NCCL', 'commit'))}"
    )
    print(table(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
