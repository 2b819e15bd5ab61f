"""Counts instructions with valgrind's callgrind: of two numbers of steps the difference."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, order=True)
class Case:
    """A wrapping, blocks, parameters in each, and the ranks that the process takes itself to be one of."""

    name: str
    blocks: int
    parameters: int = 9
    ranks: int = 2

    @property
    def size(self) -> str:
        """As the programs take it."""
        return f"{self.blocks}x{self.parameters}x{self.ranks}"


#: What hangs on where blocks of memory lie rather than on what is done: the allocator's inner work, the lookup of a
#: symbol when it is used first, and Python's search for a name where its cache, which goes by address, has another.
UNSTEADY = frozenset({
    "_int_malloc", "_int_free", "_int_memalign", "_int_realloc", "malloc_consolidate", "unlink_chunk",
    "unlink_chunk.constprop.0", "unlink_chunk.isra.0", "sysmalloc", "systrim", "systrim.constprop.0", "alloc_perturb",
    "_dl_fixup", "_dl_lookup_symbol_x", "do_lookup_x", "check_match", "strcmp",
    "find_name_in_mro", "_Py_dict_lookup", "unicodekeys_lookup_unicode", "_PyDict_GetItem_KnownHash", "_PyType_Lookup",
    "assign_version_tag.isra.0",
})  # fmt: skip

#: Instructions or microseconds a step.
Costs = dict[Case, float]
#: What shardwise's counters say of a step.
Counters = dict[Case, dict[str, int]]


def program(build: Path) -> Path:
    return build / "benchmarks" / "cpp" / "host_cost"


def problem(build: Path) -> str:
    """Why instructions cannot be counted here; empty if they can."""
    if shutil.which("valgrind") is None:
        return "there is no valgrind on the PATH (Debian, Ubuntu: apt-get install valgrind)"
    done = subprocess.run([str(program(build)), "--probe"], capture_output=True, text=True)
    if done.stdout.strip() != "counts":
        return "the benchmarks were built where valgrind's headers are missing: install valgrind, then `make clean`"
    return ""


def under_valgrind(out: Path) -> list[str]:
    return ["valgrind", "--tool=callgrind", "--quiet", "--instr-atstart=no", f"--callgrind-out-file={out}"]


@dataclass(frozen=True)
class Counted:
    """`kinds`: what functions cost themselves, by what the caller called them."""

    costs: Costs
    counters: Counters
    kinds: Mapping[str, Costs]


def count(
    commands: Mapping[str, Sequence[str]],
    keep: Path | None = None,
    without: Container[str] = (),
    kind: Callable[[str, str], str] | None = None,
) -> Counted:
    """Of steps, by programs that measure two lengths of each case, some times each. `commands` are named by what their
    cases begin with; all run at the same time, for counts do not feel the load. `keep`: a folder where callgrind's
    files stay; `without`: functions whose own instructions do not count; `kind` says of which kind a function is, by
    its library and its name."""
    costs: Costs = {}
    counters: Counters = {}
    kinds: dict[str, Costs] = defaultdict(dict)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as scratch:
        for name, (out, said) in run(commands, keep or Path(scratch)).items():
            costs |= differences(name, read_counts(out, without))
            counters |= read_counters(name, said)
            for each, of_kind in count_kinds(name, out, kind).items() if kind else ():
                kinds[each] |= of_kind
    return Counted(costs, counters, kinds)


def count_kinds(language: str, out: Path, kind: Callable[[str, str], str]) -> dict[str, Costs]:
    counted = []
    for case, steps, text in read_files(out):
        own: Counter[str] = Counter()
        for library, function, cost in own_costs(text):
            own[kind(library, function)] += cost
        counted.append((case, steps, own))
    kinds = {each for _, _, own in counted for each in own}
    return {each: differences(language, ((case, steps, own[each]) for case, steps, own in counted)) for each in kinds}


def count_once(commands: Mapping[str, Sequence[str]]) -> Costs:
    """Of what happens once, by programs that measure each case so."""
    costs: Costs = {}
    with tempfile.TemporaryDirectory(prefix="shardwise-") as scratch:
        for name, (out, _) in run(commands, Path(scratch)).items():
            costs |= {replace(case, name=f"{name} {case.name}"): total for case, _, total in read_counts(out)}
    return costs


def run(commands: Mapping[str, Sequence[str]], folder: Path) -> dict[str, tuple[Path, str]]:
    """Where callgrind's files of each command begin, and what it said."""
    started = []
    result = {}
    # Python's dictionaries of names then look the same each time.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    try:
        for name, command in commands.items():
            out = folder / name
            words = [*under_valgrind(out), *command]
            process = subprocess.Popen(
                words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            started.append((name, out, process))
        for name, out, process in started:
            said, _ = process.communicate()
            if process.returncode != 0:
                raise RuntimeError(f"bench: {name} under valgrind ended with {process.returncode}:\n{said}")
            result[name] = (out, said)
    finally:
        for _, _, process in started:
            process.kill()
            process.wait()
    return result


def read_files(out: Path) -> Iterator[tuple[Case, int, str]]:
    """Case, steps and text of every file that callgrind wrote."""
    for file in sorted(out.parent.glob(f"{out.name}.*")):
        text = file.read_text()
        label = re.search(r"^desc: Trigger: Client Request: (\w+) (\d+)x(\d+)x(\d+) (\d+)$", text, re.MULTILINE)
        if label:
            yield Case(label[1], int(label[2]), int(label[3]), int(label[4])), int(label[5]), text


def read_counts(out: Path, without: Container[str] = ()) -> Iterator[tuple[Case, int, int]]:
    """Case, steps and instructions of every file that callgrind wrote, but for functions' own named in `without`."""
    for case, steps, text in read_files(out):
        left_out = sum(cost for _, name, cost in own_costs(text) if name in without) if without else 0
        if total := re.search(r"^totals: (\d+)", text, re.MULTILINE):
            yield case, steps, int(total[1]) - left_out


def own_costs(text: str) -> Iterator[tuple[str, str, int]]:
    """Libraries, functions, and instructions of their own, of each of their lines."""
    names: dict[str, str] = {}
    now = {"ob": "", "fn": ""}
    is_of_call = False
    for line in text.splitlines():
        if named := re.match(r"(c?)(ob|fn)=(\(\d+\))(?: (.+))?$", line):
            # A name is written once in a file, by itself or where it is called first.
            number = named[2] + named[3]
            names[number] = named[4] or names[number]
            if not named[1]:
                now[named[2]] = names[number]
        elif line.startswith("calls="):
            is_of_call = True
        elif line and line[0] in "0123456789+-*":
            words = line.split()
            if not is_of_call and len(words) > 1:
                yield now["ob"], now["fn"], int(words[1])
            is_of_call = False


def read_counters(language: str, said: str) -> Counters:
    """Of what the programs print."""
    found = re.findall(r"^counters (\w+) (\d+)x(\d+)x(\d+) (\{.*\})$", said, re.MULTILINE)
    return {
        Case(f"{language} {name}", int(blocks), int(parameters), int(ranks)): json.loads(text)
        for name, blocks, parameters, ranks, text in found
    }


def differences(language: str, counts: Iterable[tuple[Case, int, int]]) -> Costs:
    """Instructions a step, by the fewest of each number of steps; what surrounds the steps is not in it."""
    by_case: dict[Case, dict[int, int]] = {}
    for case, steps, total in counts:
        named = replace(case, name=f"{language} {case.name}")
        totals = by_case.setdefault(named, {})
        totals[steps] = min(total, totals.get(steps, total))
    costs: Costs = {}
    for case, totals in by_case.items():
        few, many = min(totals), max(totals)
        costs[case] = (totals[many] - totals[few]) / (many - few)
    return costs
