"""The suite `steps`: whole steps of a GPT on ranks of this machine, each wrapping beside DDP."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from figures import Figure
from turns import Program, ratio, started, take_turns

HERE = Path(__file__).resolve().parent
DDP = "Python ddp"
NAMES = {
    DDP: "DDP",
    "Python fsdp2": "FSDP2",
    "Python fsdp2_keep": "FSDP2 kept",
    "Python torch_hsdp": "FSDP2 on 2 axes",
    "Python torch_replicate": "torch's replicate",
    "Python deepspeed": "DeepSpeed ZeRO-3",
}
#: Torch's wrappings over our process groups, for the engines without the transports.
OVER_SHARDWISE = "_over_shardwise"
DDP_OVER_SHARDWISE = f"{DDP}{OVER_SHARDWISE}"
COUNTED = {
    "all_gathers": "all-gathers",
    "reduce_scatters": "reduce-scatters",
    "all_reduces": "all-reduces",
    "allocations": "buffers allocated",
}
COPIED = {"gradient_copy_bytes": "gradients copied", "parameter_copy_bytes": "parameters copied"}


@dataclass(frozen=True)
class Size:
    """A model, how many ranks train it, and how often each wrapping has its turn."""

    layers: int
    width: int
    heads: int
    world: int
    rounds: int
    steps: int


#: Those that take turns; at most as many at a time as 20 GiB hold. DDP is always there.
#: After a plus: an optimizer other than ours.
CPP = tuple(
    f"C++ {wrap}"
    for wrap in ("fully_shard", "fully_shard+libtorch", "fully_shard_keep", "fully_shard_flat", "replicate")
)
PYTHON = (
    *(f"Python {wrap}" for wrap in ("fully_shard", "fully_shard_keep", "replicate")),
    *(f"Python {wrap}_over_gloo" for wrap in ("fully_shard", "replicate")),
)
TORCH = tuple(f"Python {wrap}" for wrap in ("none", "fsdp2", "fsdp2_keep"))
TORCH_COPIES = ("Python torch_replicate",)
#: Each beside DDP over our transport too.
SAME_TRANSPORT = (
    (DDP_OVER_SHARDWISE, "C++ fully_shard", "Python fully_shard", f"Python fsdp2{OVER_SHARDWISE}"),
    (DDP_OVER_SHARDWISE, "C++ fully_shard_keep", "Python fully_shard_keep", f"Python fsdp2_keep{OVER_SHARDWISE}"),
    (DDP_OVER_SHARDWISE, "C++ replicate", "Python replicate", f"Python torch_replicate{OVER_SHARDWISE}"),
)
#: It takes 10 GiB for 107 million parameters.
DEEPSPEED = ("Python deepspeed",)
ALL = (CPP, PYTHON, TORCH, TORCH_COPIES, *SAME_TRANSPORT, DEEPSPEED)
FOUR = (("C++ fully_shard", "C++ replicate", "C++ hsdp"), ("Python hsdp", "Python torch_hsdp", "Python fsdp2"))
SMALL = Size(layers=4, width=192, heads=6, world=2, rounds=3, steps=2)
FULL = (
    (Size(layers=8, width=512, heads=8, world=2, rounds=9, steps=3), ALL),
    (Size(layers=15, width=768, heads=12, world=2, rounds=7, steps=2), ALL),
    (Size(layers=8, width=512, heads=8, world=4, rounds=7, steps=2), FOUR),
    (Size(layers=15, width=768, heads=12, world=4, rounds=5, steps=1), tuple((each,) for each in FOUR[0])),
)


@dataclass
class Measured:
    """The programs that took turns, DDP's first, with what each counted by itself."""

    size: Size
    programs: list[Program]
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)


def command(name: str, build: Path, size: Size, store: Path, peers: Path | None) -> list[str]:
    language, wrap = name.split()
    words = [str(build / "benchmarks" / "cpp" / "rank_steps")]
    if language == "Python":
        words = [sys.executable, str(HERE / "python" / "rank_steps.py"), *(["--peers", str(peers)] if peers else [])]
    wrap, _, optimizer = wrap.partition("+")
    words += ["--optimizer", optimizer] if optimizer else []
    words += ["--wrap", wrap, "--world", str(size.world), "--store", str(store)]
    return [*words, "--layers", str(size.layers), "--width", str(size.width), "--heads", str(size.heads)]


def measure(build: Path, size: Size, names: Sequence[str], peers: Path | None = None) -> Measured:
    def words(name: str, store: Path) -> list[str]:
        return command(name, build, size, store, peers)

    with started(words, (DDP, *names), size.world) as programs:
        measured = Measured(size, programs)
        take_turns(measured.programs, size.rounds, size.steps)
        for program in measured.programs:
            if program.name.startswith("Python"):
                measured.collectives[program.name] = program.ask("count")[0]
            if has_plan(program.name):
                measured.plans[program.name] = program.ask("plan")[0]
    return measured


def has_plan(name: str) -> bool:
    return name.removesuffix(OVER_SHARDWISE) not in NAMES and not name.endswith(" none")


def shown_name(name: str) -> str:
    return NAMES.get(name.removesuffix(OVER_SHARDWISE), name)


def wire_bound(name: str, parameters: float, world: int, plan: dict[str, Any]) -> float | None:
    """The bytes that all ranks together cannot do without: everyone sends what he alone has once to all others, and
    sums are of parts."""
    if name == DDP:
        return 2 * (world - 1) * parameters
    if not plan:
        return None
    total = 0.0
    for unit in plan["units"]:
        sizes = [axis["size"] for axis in unit["axes"]]
        shards, ranks = sizes[-1], world
        for group in unit["groups"]:
            gathers = group["forward_gathers"]["bytes"] + group["backward_gathers"]["bytes"]
            total += ranks * gathers * (shards - 1)
            total += ranks * group["reduce_scatters"]["bytes"] * (shards - 1) / shards
            copies = sizes[0]
            total += ranks * group["all_reduces"]["bytes"] * 2 * (copies - 1) / copies
    return total


def figures(measured: Measured) -> Iterator[Figure]:
    size, ddp = measured.size, measured.programs[0]
    parameters = ddp.most("parameter_bytes")
    about = f"{parameters / 4e6:.0f} M, {size.world} ranks"

    def figure(program: Program, name: str, value: float, unit: str, note: str = "") -> Figure:
        return Figure("steps", f"{about}: {shown_name(program.name)}: {name}", value, unit, note)

    second = measured.programs[1]
    if second.name == DDP_OVER_SHARDWISE:
        for program in measured.programs[1:]:
            note = f"{ratio(program, ddp, 'seconds'):.3g} x DDP over Gloo"
            yield figure(program, "step, same transport", ratio(program, second, "seconds"), "x DDP", note)
        return
    for program in measured.programs:
        wall, cpu = program.of_rounds("seconds"), program.of_rounds("cpu_seconds")
        least = 1e3 * program.least("seconds")
        note = f"median {1e3 * statistics.median(wall):.0f} ms, least {least:.0f} ms"
        yield figure(program, "step", ratio(program, ddp, "seconds"), "x DDP", note)
        note = f"{1e3 * statistics.median(cpu):.0f} ms a rank"
        yield figure(program, "CPU time", ratio(program, ddp, "cpu_seconds"), "x DDP", note)
    for program in measured.programs:
        bound = wire_bound(program.name, parameters, size.world, measured.plans.get(program.name, {}))
        note = f"{bound / parameters:.4g} P are needed" if bound is not None else ""
        yield figure(program, "on the wire", program.wire_bytes() / parameters, "P a step", note)
        peak, between = program.most("tensor_peak_bytes"), program.most("tensor_bytes")
        yield figure(program, "tensors at the peak", peak / parameters, "P", f"{peak / 2**20:.0f} MiB")
        yield figure(program, "tensors between steps", between / parameters, "P", "gradients are there")
        resident = program.most("resident_peak_mib")
        beyond = f"{resident - program.most('resident_before_mib'):.0f} MiB beyond the start"
        yield figure(program, "resident set at the peak", resident, "MiB", beyond)
    for program in measured.programs:
        for key, value in measured.collectives.get(program.name, {}).items():
            yield figure(program, key, value, "a step")
        if program.name.startswith("C++") and has_plan(program.name):
            for key, text in COUNTED.items():
                if program.last(key) or key == "allocations":
                    yield figure(program, text, program.last(key), "a step")
            for key, text in COPIED.items():
                yield figure(program, text, program.last(key) / parameters, "P a step")


def suite(build: Path, quick: bool, peers: Path | None, only: str = "", rounds: int | None = None) -> Iterator[Figure]:
    """`peers`: the folder of packages to measure beside, if there is one; `only`: what names begin with; `rounds` in
    the place of the sizes' own."""
    if quick:
        chosen = [*CPP, "Python fully_shard", "Python replicate", "Python fsdp2", "Python torch_replicate"]
        chosen += DEEPSPEED if peers else ()
        yield from figures(measure(build, SMALL, [name for name in chosen if name.startswith(only)], peers))
        return
    if peers is None:
        print("steps  DeepSpeed was not measured: `make bench PEERS=1` fetches it", flush=True)
    for size, sets in FULL:
        for names in sets:
            wanted = [name for name in names if name.startswith(only)]
            if wanted and (peers or names != DEEPSPEED) and (not only or names not in SAME_TRANSPORT):
                yield from figures(measure(build, replace(size, rounds=rounds or size.rounds), wanted, peers))
