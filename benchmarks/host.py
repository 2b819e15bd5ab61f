"""The suite `host`: what a unit costs the host in a forward and backward, with collectives that do nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from figures import Figure

HERE = Path(__file__).resolve().parent
PYTHON = [sys.executable, str(HERE / "python" / "host_cost.py")]

#: Case and number of blocks; instructions or microseconds a step.
Costs = dict[tuple[str, int], float]

#: What each of our cases is compared with.
RIVALS = {
    "C++ fully_shard": "FSDP2",
    "C++ fully_shard_flat": "FSDP2",
    "C++ fully_shard_keep": "FSDP2 kept",
    "C++ replicate": "torch's replicate",
    "Python replicate": "torch's replicate",
}
NAMES = {
    "Python fsdp2": "FSDP2",
    "Python fsdp2_keep": "FSDP2 kept",
    "Python torch_replicate": "torch's replicate",
    "Python ddp": "DDP",
}
#: Calls that no unit has a part in.
CALLS = ("call", "call_hook", "checkpoint")


def valgrind_problem(build: Path) -> str:
    """Why instructions cannot be counted here; empty if they can."""
    if shutil.which("valgrind") is None:
        return "there is no valgrind on the PATH (Debian, Ubuntu: apt-get install valgrind)"
    probe = [*under_valgrind(Path("/dev/null")), str(program(build)), "--probe"]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.stdout.strip() != "counts":
        return "the benchmarks were built where valgrind's headers are missing: install valgrind, then `make clean`"
    return ""


def program(build: Path) -> Path:
    return build / "benchmarks" / "cpp" / "host_cost"


def under_valgrind(out: Path) -> list[str]:
    return ["valgrind", "--tool=callgrind", "--quiet", "--instr-atstart=no", f"--callgrind-out-file={out}"]


def microseconds(commands: Mapping[str, Sequence[str]], sizes: Sequence[int]) -> Costs:
    """Of the fastest step."""
    costs: Costs = {}
    for language, command in commands.items():
        done = run([*command, "--blocks", ",".join(map(str, sizes))])
        for line in done.stdout.splitlines():
            name, blocks, cost = line.split()
            costs[f"{language} {name}", int(blocks)] = float(cost)
    return costs


def programs(build: Path) -> dict[str, list[str]]:
    return {"C++": [str(program(build))], "Python": PYTHON}


def instructions(
    commands: Mapping[str, Sequence[str]], sizes: Sequence[int], keep: Path | None = None, only: Sequence[str] = ()
) -> Costs:
    """All programs at the same time: counts do not feel the load. `keep`: where callgrind's files stay. `only`: cases,
    of the C++ program."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as scratch:
        folder = keep or Path(scratch)
        started = []
        for language, command in commands.items():
            out = folder / ("cpp" if language == "C++" else "python")
            words = [*under_valgrind(out), *command, "--blocks", ",".join(map(str, sizes))]
            words += ["--only", ",".join(only)] if only else []
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            started.append((language, out, process))
        costs: Costs = {}
        try:
            for language, out, process in started:
                said, _ = process.communicate()
                if process.returncode != 0:
                    raise RuntimeError(f"bench: {language} under valgrind ended with {process.returncode}:\n{said}")
                for (name, blocks), cost in differences(read_counts(out)).items():
                    costs[f"{language} {name}", blocks] = cost
        finally:
            for _, _, process in started:
                process.kill()
                process.wait()
        return costs


def read_counts(out: Path) -> Iterator[tuple[str, int, int, int]]:
    """Case, blocks, steps and instructions of every file that callgrind wrote."""
    for file in sorted(out.parent.glob(f"{out.name}.*")):
        text = file.read_text()
        label = re.search(r"^desc: Trigger: Client Request: (\w+) (\d+) (\d+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
        if label and total:
            yield label[1], int(label[2]), int(label[3]), int(total[1])


def differences(counts: Iterator[tuple[str, int, int, int]]) -> Costs:
    """Instructions a step: of two lengths the difference, so that what surrounds the steps is not in it."""
    by_case: dict[tuple[str, int], dict[int, int]] = {}
    for name, blocks, steps, total in counts:
        by_case.setdefault((name, blocks), {})[steps] = total
    costs: Costs = {}
    for case, totals in by_case.items():
        few, many = min(totals), max(totals)
        costs[case] = (totals[many] - totals[few]) / (many - few)
    return costs


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"bench: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def figures(costs: Mapping[tuple[str, int], float], unit: str, scale: float) -> Iterator[Figure]:
    """The cost of a unit beyond no wrapping, and of a call."""
    extra: dict[tuple[str, int], float] = {}
    for (case, blocks), cost in costs.items():
        language, name = case.split(" ", 1)
        if name not in ("none", "forward"):
            plain = 0.0 if name.startswith("call") else costs[f"{language} none", blocks]
            again = costs["C++ forward", blocks] if name == "checkpoint" else 0.0
            extra[case, blocks] = (cost - plain - again) / blocks / scale
    for (case, blocks), value in sorted(extra.items(), key=lambda item: (item[0][1], item[0][0])):
        name = case.split(" ", 1)[1]
        if name in CALLS:
            about = {
                "call": "call() of a module without hooks",
                "call_hook": "call() with one forward pre-hook",
                "checkpoint": "checkpoint(), without fn's second run",
            }
            yield Figure("host", about[name], value, f"{unit} a call")
            continue
        rival = RIVALS.get(case, "")
        rivals = {NAMES[other]: cost for (other, size), cost in extra.items() if other in NAMES and size == blocks}
        note = f"{value / rivals[rival]:.3f} x {rival}" if rival in rivals else ""
        yield Figure("host", f"{NAMES.get(case, case)}, {blocks} blocks", value, f"{unit} a unit", note)
    for (case, blocks), cost in sorted(costs.items()):
        if case.endswith(" none"):
            language = case.split()[0]
            note = "the blocks themselves"
            yield Figure("host", f"{language} none, {blocks} blocks", cost / blocks / scale, f"{unit} a block", note)
