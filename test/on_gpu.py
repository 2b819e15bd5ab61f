"""What a machine with a GPU should show of shardwise, in stages of steps that run beside each other.

usage: on_gpu.py [STEP ...] [--device cuda|late] [--kit FOLDER] [--seconds N] [--again] [--list] [--only FILTER]
                 [--folder FOLDER]

Without steps it runs all of them that are not done, in this order; a name stands for all steps that begin so. Each
writes a log and FOLDER/STEP.json (default: build/gpu/DEVICE): what came of it, machine, GPU, driver, versions, commit
and date; logs.tar.gz has all logs. A step that has passed with this commit, torch and GPU is done: it is run again with
--again only. What is missing on this machine is named, and fails nothing. --kit: what `make gpu-kit` made, in the place
of a build. --seconds: all steps together take no longer. With --device late test/late_device stands in for the GPU.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gpu_kit
from on_gpu_steps import BUILD, MISSING, STAGES, Outcome, Place, Step, gpus, shared_gpu
from programs import ROOT, last_lines
from reports import FAILED, PASSED

sys.path.append(str(ROOT / "benchmarks"))
import machine
from gpu import Gpus

#: A result counts as long as these are the same.
COUNTS_FOR = ("commit", "torch", "GPU")
#: What logs.tar.gz has: of a log's end, of all logs, of all others. It stays below 16 MiB, however badly they pack.
SAVED = (".log", ".json", ".md", ".svg", ".xml")
LOG_BYTES, LOGS_BYTES, OTHERS_BYTES = 300_000, 12_000_000, 4_000_000


@dataclass(frozen=True)
class Done:
    """What a step's file says."""

    step: str
    result: str
    said: str
    seconds: float
    facts: dict[str, str]

    @classmethod
    def read(cls, file: Path) -> Done | None:
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):  # none, or one that breaks off
            return None

    def write(self, file: Path) -> None:
        # A run that is ended meanwhile leaves what was there.
        written = file.with_suffix(".new")
        written.write_text(json.dumps(vars(self), indent=1) + "\n")
        written.replace(file)

    def counts_for(self, facts: dict[str, str]) -> bool:
        return self.result == PASSED and all(self.facts.get(name) == facts.get(name) for name in COUNTS_FOR)


def nccl_versions() -> str:
    """Of torch's NCCL, and of one that takes its place where ranks share a GPU."""

    def version(found: Gpus) -> str:
        return ".".join(map(str, found.nccl)) or "none"

    if "LD_PRELOAD" not in shared_gpu():
        return version(gpus())
    return f"{version(Gpus.found())} ({version(gpus())} where ranks share a GPU)"


def facts_of(device: str) -> dict[str, str]:
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    gpu, _, driver = machine.first_line(*query).partition(", ")
    cuda = machine.first_line(sys.executable, "-c", "import torch; print(torch.version.cuda)")
    of_gpu = {"GPU": gpu, "driver": driver or "none", "CUDA of torch": cuda, "NCCL": nccl_versions()}
    return {
        **machine.facts(),
        **of_gpu,
        "nvcc": machine.first_line("sh", "-c", "nvcc --version | tail -1"),
        "device": device,
    }


def run_step(step: Step, place: Place, facts: dict[str, str]) -> Done:
    place.log.unlink(missing_ok=True)
    begin = time.monotonic()
    try:
        outcome = step.run(place) if place.limit > 5 else Outcome(MISSING, "the time was up")
    except Exception as error:
        outcome = Outcome(FAILED, f"{type(error).__name__}: {error}")
    done = Done(step.name, outcome.result, outcome.said, round(time.monotonic() - begin, 1), facts)
    done.write(place.result)
    print(f"{step.name}: {outcome.result} in {done.seconds:.0f} s: {outcome.said}", flush=True)
    if outcome.result == FAILED:
        print(last_lines(place.log, 30), flush=True)
    return done


def chosen(names: Sequence[str], stages: Sequence[Sequence[Step]]) -> list[list[Step]]:
    known = [step.name for stage in stages for step in stage]
    unknown = [name for name in names if not any(step.startswith(name) for step in known)]
    if unknown:
        sys.exit(f"on_gpu: there is no step {', '.join(unknown)}. There are: {', '.join(known)}.")
    wanted = tuple(names) or ("",)
    return [[step for step in stage if step.name.startswith(wanted)] for stage in stages]


def save_logs(folder: Path) -> None:
    """All logs in one file, of long ones their ends; and other files whole, the small ones first."""
    files = [path for path in folder.rglob("*") if path.suffix in SAVED and path.is_file()]
    end = min(LOG_BYTES, LOGS_BYTES // max(sum(path.suffix == ".log" for path in files), 1))
    room = OTHERS_BYTES
    with tarfile.open(folder / "logs.tar.gz", "w:gz") as archive:
        for path in sorted(files, key=lambda path: path.stat().st_size):
            content = path.read_bytes()
            if path.suffix == ".log":
                content = content[-end:]
            elif len(content) > room:
                continue
            else:
                room -= len(content)
            entry = archive.gettarinfo(path, str(path.relative_to(folder)))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def table(found: Mapping[str, Done | None]) -> str:
    width = max(map(len, found))
    lines = [f"{'step':{width}}  {'result':7}  seconds"]
    for name, done in found.items():
        seconds, said = (f"{done.seconds:.0f}", done.said.partition("\n")[0]) if done else ("", "")
        lines.append(f"{name:{width}}  {done.result if done else 'not run':7}  {seconds:>7}  {said}".rstrip())
    return "\n".join(lines)


def main(words: Sequence[str] | None = None, stages: Sequence[Sequence[Step]] = STAGES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--device", choices=("cuda", "late"), default="cuda")
    parser.add_argument("--kit", type=Path, help="the folder of `make gpu-kit`, in the place of a build")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all steps together may take")
    parser.add_argument("--again", action="store_true", help="also those that are done")
    parser.add_argument("--list", action="store_true", help="what there is and what came of it; runs nothing")
    parser.add_argument("--only", default="*", help="of tests in C++: a filter of GoogleTest's")
    parser.add_argument("--folder", type=Path, help="for results and logs")
    arguments = parser.parse_args(words)
    if arguments.kit and BUILD != gpu_kit.KIT:
        kit = gpu_kit.unpack(arguments.kit.resolve())
        command = [sys.executable, __file__, *(sys.argv[1:] if words is None else words)]
        return subprocess.run(command, env={**os.environ, **kit}).returncode
    until = time.monotonic() + arguments.seconds
    folder = arguments.folder or ROOT / "build" / "gpu" / arguments.device
    folder.mkdir(parents=True, exist_ok=True)
    facts = facts_of(arguments.device)
    (folder / "facts.json").write_text(json.dumps(facts, indent=1))
    found: dict[str, Done | None] = {}
    with ThreadPoolExecutor(max(len(stage) for stage in stages)) as beside:
        for stage in chosen(arguments.steps, stages):
            running = []
            for step in stage:
                limit = min(step.limit, until - time.monotonic())
                place = Place(step.name, arguments.device, folder, arguments.only, limit)
                found[step.name] = done = Done.read(place.result)
                if arguments.list:
                    print(f"{step.name}: {step.about}")
                elif done and done.counts_for(facts) and not arguments.again:
                    print(f"{step.name}: has passed on {done.facts['date']}; --again (AGAIN=1) runs it again")
                else:
                    print(
                        f"{step.name}: running, for {limit:.0f} s at most; its output goes to {place.log}", flush=True
                    )
                    running.append(beside.submit(run_step, step, place, facts))
            found |= {done.step: done for done in (each.result() for each in running)}
    names = ("machine", "GPU", "driver", "torch", "NCCL", "commit")
    shown = f"{', '.join(f'{name}: {facts[name]}' for name in names)}\n{table(found)}"
    print(f"\n{shown}", flush=True)
    (folder / "summary.md").write_text(f"{shown}\n")
    save_logs(folder)
    return int(not arguments.list and any(done and done.result == FAILED for done in found.values()))


if __name__ == "__main__":
    sys.exit(main())
