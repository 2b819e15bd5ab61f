"""The suite `scale`: what a step and a wrapping cost as units, parameters and ranks grow; how published models lie."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import callgrind
import host
from callgrind import Case
from figures import Figure

HERE = Path(__file__).resolve().parent
WRAPS = ("fully_shard", "replicate")


@dataclass(frozen=True)
class Extent:
    """What grows: blocks x parameters in each x ranks, the smallest first. `setups` are counted, `large` is timed."""

    units: tuple[str, ...]
    parameters: tuple[str, ...]
    ranks: tuple[str, ...]
    setups: tuple[str, ...]
    large: str
    worlds: tuple[int, ...]


SHORT = Extent(
    ("8x9x2", "32x9x2"), ("8x2x2", "8x32x2"), ("8x9x2", "8x9x512"), ("10x10x2", "40x10x2"), "100x100x2", (8, 1024)
)
FULL = Extent(
    ("8x9x2", "64x9x2", "512x9x2"),
    ("8x2x2", "8x20x2", "8x200x2"),
    ("8x9x2", "8x9x64", "8x9x4096"),
    ("10x10x2", "100x10x2", "1000x10x2", "10x1000x2"),
    "1000x100x2",
    (8, 64, 512, 1024, 4096, 16384),
)


def step_figures(build: Path, extent: Extent) -> Iterator[Figure]:
    """Instructions a unit, or a parameter: each is to stay what it is for the smallest."""
    sizes = list(dict.fromkeys((*extent.units, *extent.parameters, *extent.ranks)))
    commands = {"C++": host.commands(build, sizes, ("none", *WRAPS))["C++"]}
    counted = callgrind.count(commands, without=callgrind.UNSTEADY)
    units = host.units(counted.costs)
    for wrap in WRAPS:
        for what, grown in (("units", extent.units), ("parameters", extent.parameters), ("ranks", extent.ranks)):
            values = [(case_of(f"C++ {wrap}", size), units[case_of(f"C++ {wrap}", size)]) for size in grown]
            yield from growth(f"{wrap}, a step", what, values)
        for size in extent.units:
            of = counted.counters[case_of(f"C++ {wrap}", size)]
            calls = of["all_gathers"] + of["reduce_scatters"] + of["all_reduces"]
            blocks = int(size.split("x")[0])
            yield Figure("scale", f"{wrap}: collectives a step, {blocks} units", calls / blocks, "a unit")


def growth(name: str, what: str, values: Sequence[tuple[Case, float]]) -> Iterator[Figure]:
    """What one more costs, beside what one costs where there are fewest: 1 where nothing grows faster than the work."""
    first, least = values[0]
    for case, cost in values:
        number = getattr(case, "blocks" if what == "units" else what)
        unit = "k instructions a unit"
        note = f"{cost / least:.3f} x of {getattr(first, 'blocks' if what == 'units' else what)}"
        if what == "parameters":
            note = f"{cost / number / 1e3:.2f} k a parameter"
        yield Figure("scale", f"{name}: {number} {what}", cost / 1e3, unit, note if number != 1 else "")


def case_of(name: str, size: str) -> Case:
    return Case(name, *map(int, size.split("x")))


def setup_command(build: Path, sizes: Sequence[str], only: Sequence[str] = WRAPS) -> list[str]:
    return [str(build / "benchmarks" / "cpp" / "setup_cost"), "--sizes", ",".join(sizes), "--only", ",".join(only)]


def setup_figures(build: Path, extent: Extent) -> Iterator[Figure]:
    """Instructions of wrapping a model, a parameter tensor."""
    totals = callgrind.count_once({"C++": setup_command(build, extent.setups)})
    for case, total in sorted(totals.items()):
        tensors = case.blocks * case.parameters
        words = f"{case.name.split()[1]}, set-up: {case.blocks} units of {case.parameters}"
        yield Figure("scale", words, total / tensors / 1e3, "k instructions a tensor")


def large_figures(build: Path, extent: Extent) -> Iterator[Figure]:
    blocks, parameters, _ = map(int, extent.large.split("x"))
    for wrap in WRAPS:
        # In a process of its own: what another let go of would be used again.
        found = json.loads(run(setup_command(build, [extent.large], [wrap])))
        words = f"{found['name']}, set-up of {blocks * parameters} tensors"
        yield Figure(
            "scale", words, found["seconds"], "s", f"{1e6 * found['seconds'] / blocks / parameters:.1f} us each"
        )
        kb = found["resident_kb"] / blocks / parameters
        yield Figure("scale", f"{words}: resident set", found["resident_kb"] / 1024, "MiB", f"{kb:.2f} kB each")


def model_figures(build: Path, extent: Extent, files: Sequence[Path] = ()) -> Iterator[Figure]:
    """How the parameters of published models lie among ranks, in float."""
    for file in files or sorted((HERE / "models").glob("*.tsv")):
        title = file.read_text().splitlines()[0].lstrip("# ")
        words = [str(build / "benchmarks" / "cpp" / "plan_models"), str(file), *map(str, extent.worlds)]
        for line in run(words).splitlines():
            found = json.loads(line)
            yield model_figure(title, found)
            yield time_figure(title, found)


def model_figure(title: str, found: dict[str, Any]) -> Figure:
    name = f"{title} on {found['ranks']} ranks, {found['layout']}: padding"
    note = (
        f"{found['rank_bytes'] / 2**30:.3g} GiB a rank, {found['largest_gather'] / 2**30:.3g} GiB gathered at most, "
        f"laid out in {1e3 * found['seconds']:.2g} ms"
    )
    return Figure("scale", name, 100 * found["padding_bytes"] / found["parameters"] / 4, "%", note)


def time_figure(title: str, found: dict[str, Any]) -> Figure:
    name = f"{title} on {found['ranks']} ranks, {found['layout']}: step, estimated"
    note = f"computes {1e3 * found['compute']:.3g} ms, {1e3 * found['wire']:.3g} ms on the wire"
    return Figure("scale", name, found["step"] / found["compute"], "x computing", note)


def published_parameters(file: Path) -> int:
    """What the head of a file of benchmarks/models says."""
    found = re.search(r"^# parameters: (\d+)$", file.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"bench: {file} does not say how many parameters the model has: # parameters: N")
    return int(found[1])


def run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"bench: {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
