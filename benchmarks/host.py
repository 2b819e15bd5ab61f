"""The suite `host`: what a unit costs the host in a forward and backward, with collectives that do nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from callgrind import Case, Costs, program
from figures import Figure
from kinds import Kind, kind_of

HERE = Path(__file__).resolve().parent
PYTHON = [sys.executable, str(HERE / "python" / "host_cost.py")]

#: Blocks x parameters in each x ranks.
SHORT = ("8x9x2",)
FULL = tuple(f"{blocks}x{parameters}x2" for blocks in (8, 32) for parameters in (2, 9, 24))

#: What each of our cases is compared with.
RIVALS = {
    "C++ fully_shard": "FSDP2",
    "C++ fully_shard_flat": "FSDP2",
    "C++ fully_shard_keep": "FSDP2 kept",
    "C++ replicate": "torch's replicate",
    "Python fully_shard": "FSDP2",
    "Python fully_shard_keep": "FSDP2 kept",
    "Python replicate": "torch's replicate",
}
NAMES = {
    "Python fsdp2": "FSDP2",
    "Python fsdp2_keep": "FSDP2 kept",
    "Python torch_replicate": "torch's replicate",
    "Python ddp": "DDP",
}
#: Calls that no unit has a part in.
CALLS = {
    "call": "call() of a module without hooks",
    "call_hook": "call() with one forward pre-hook",
    "checkpoint": "activation_checkpoint(), without fn's second run",
}
#: A fused AdamW's step of plain tensors, of DTensors, of DTensors with local_optimizer(), and after
#: set_local_optimizers().
STEPS = {
    "step_plain": "tensors",
    "step_dtensors": "DTensors",
    "step_local": "DTensors, locally",
    "step_automatic": "DTensors, locally by itself",
}
#: Two layers of each block, divided by tensor parallelism, and two stages of as many microbatches.
PARALLEL = {"layers": "a Linear of tensor parallelism", "microbatches": "a microbatch of a stage"}


KINDS = tuple(Kind(*each) for each in (
    ("operations that are watched", r"", r"shardwise::nn::"),
    ("the order of units", r"", r"shardwise::engine::"),
    ("parameters, gradients, copies", r"", r"shardwise::(group|kernels)::"),
    ("buffers and collectives", r"", r"shardwise::(comm|transport|observe|base)::"),
    ("Python's side of the engine", r"/_C\.|/libtorch_python", r""),
    ("Python", r"/(lib)?python[\d.]+[^/]*$", r""),
    ("torch", r"/lib(torch|c10)", r""),
    ("the C library, and the rest", r"", r""),
))  # fmt: skip
#: Whose kinds are told.
PROFILED = ("C++ fully_shard", "C++ fully_shard_keep", "C++ replicate",
            "Python fully_shard", "Python fully_shard_keep", "Python replicate")  # fmt: skip


def kind(library: str, function: str) -> str:
    return kind_of(KINDS, library, function)


def kind_figures(kinds: Mapping[str, Costs]) -> Iterator[Figure]:
    for each in KINDS:
        for case, cost in sorted(units(kinds.get(each.name, {})).items()):
            if case.name in PROFILED:
                size = f"{case.blocks} blocks of {case.parameters}"
                yield Figure("host", f"{case.name}, {size}: {each.name}", cost / 1e3, "k instructions a unit")


def commands(build: Path, sizes: Sequence[str], only: Sequence[str] = ()) -> dict[str, list[str]]:
    """By language; `only` are cases as the programs name them."""
    words = ["--sizes", ",".join(sizes), *(["--only", ",".join(only)] if only else [])]
    return {"C++": [str(program(build)), *words], "Python": [*PYTHON, *words]}


def microseconds(programs: Mapping[str, Sequence[str]]) -> Costs:
    """Of the fastest step; one program after the other."""
    costs: Costs = {}
    for language, command in programs.items():
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"bench: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        for name, size, cost in re.findall(r"^(\w+) (\d+x\d+x\d+) ([\d.e+]+)$", done.stdout, re.MULTILINE):
            blocks, parameters, ranks = map(int, size.split("x"))
            costs[Case(f"{language} {name}", blocks, parameters, ranks)] = float(cost)
    return costs


def units(costs: Mapping[Case, float]) -> Costs:
    """The cost of a unit, or of a call: beyond the same blocks without wrapping."""
    extra: Costs = {}
    for case, cost in costs.items():
        language, name = case.name.split(" ", 1)
        if name in ("none", "forward") or name.endswith("_none"):
            continue
        if (what := name.removeprefix("torch_")) in PARALLEL:
            extra[case] = (cost - costs[replace(case, name=f"{language} {what}_none")]) / (2 * case.blocks)
            continue
        plain = replace(case, name=f"{language} none")
        without = 0.0 if name.startswith("call") or name in STEPS else costs[plain]
        again = costs[replace(case, name="C++ forward")] if name == "checkpoint" else 0.0
        extra[case] = (cost - without - again) / case.blocks
    return extra


def figures(costs: Mapping[Case, float], unit: str, scale: float) -> Iterator[Figure]:
    extra = units(costs)
    for case, cost in sorted(extra.items(), key=lambda item: (item[0].blocks, item[0].parameters, item[0].name)):
        language, name = case.name.split(" ", 1)
        value = cost / scale
        size = f"{case.blocks} blocks of {case.parameters}"
        if name in CALLS:
            yield Figure("host", CALLS[name], value, f"{unit} a call")
        elif name in STEPS:
            note = f"{cost / extra[replace(case, name=f'{language} step_plain')]:.3f} x of tensors"
            yield Figure("host", f"AdamW step of {STEPS[name]}, {size}", value, f"{unit} a block", note)
        elif name in PARALLEL:
            torchs = extra.get(replace(case, name=f"Python torch_{name}"))
            note = f"{cost / torchs:.3f} x torch's" if torchs else ""
            yield Figure("host", PARALLEL[name], value, f"{unit} more", note)
        elif name.startswith("torch_") and name.removeprefix("torch_") in PARALLEL:
            yield Figure("host", f"{PARALLEL[name.removeprefix('torch_')]}, torch's", value, f"{unit} more")
        else:
            rival = RIVALS.get(case.name, "")
            rivals = {NAMES[e.name]: c for e, c in extra.items() if replace(e, name=case.name) == case
                      and e.name in NAMES}  # fmt: skip
            note = f"{cost / rivals[rival]:.3f} x {rival}" if rival in rivals else ""
            yield Figure("host", f"{NAMES.get(case.name, case.name)}, {size}", value, f"{unit} a unit", note)
    for case, cost in sorted(costs.items()):
        if case.name.endswith(" none"):
            name = f"{case.name}, {case.blocks} blocks of {case.parameters}"
            yield Figure("host", name, cost / case.blocks / scale, f"{unit} a block", "the blocks themselves")
