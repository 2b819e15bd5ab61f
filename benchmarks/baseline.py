"""What a step costs exactly, against what it cost when somebody last looked: instructions within 3 %, and collectives,
bytes, copies and allocations as they were. What hangs on where blocks of memory lie, such as the allocator's inner
work, is left out.

usage: baseline.py [--write]     --write takes what is measured now for benchmarks/baseline.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import callgrind
import host
import machine

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")
FILE = HERE / "baseline.json"
SIZE = "4x9x2"
ONLY = ("none", "fully_shard", "fully_shard_keep", "fully_shard_flat", "replicate")
#: Of what wrapping adds to a step.
TOLERANCE = 0.03
#: What instruction counts depend on besides our sources.
VERSIONS = ("torch", "Python", "compiler", "valgrind")
REWRITE = "If that is meant, `scripts/python benchmarks/baseline.py --write` takes the new values."

#: By wrapping: instructions a unit, and counters of a step.
Measured = dict[str, dict[str, float]]


def measure(build: Path = BUILD) -> Measured:
    counted = callgrind.count(host.commands(build, [SIZE], ONLY), without=callgrind.UNSTEADY)
    units = host.units(counted.costs)
    return {case.name: {"instructions": round(units[case]), **of} for case, of in sorted(counted.counters.items())}


def problems(saved: Mapping[str, Any], measured: Measured) -> Iterator[str]:
    """What differs by more than it may; each a line."""
    for name in sorted(saved["cases"].keys() | measured.keys()):
        before, now = saved["cases"].get(name), measured.get(name)
        if before is None or now is None:
            yield f"{name}: {'not in the baseline' if before is None else 'not measured'}"
            continue
        for what in sorted(before.keys() | now.keys()):
            old, new = before.get(what, 0), now.get(what, 0)
            allowed = TOLERANCE * old if what == "instructions" else 0
            if abs(new - old) > allowed:
                yield f"{name}: {what} were {old:g} and are {new:g}" + (f" ({new / old - 1:+.1%})" if old else "")


def other_versions(saved: Mapping[str, Any]) -> str:
    """What is not as it was when the baseline was taken, for those who look for a reason."""
    facts = machine.facts()
    return ", ".join(
        f"{name} was {saved['facts'][name]} and is {facts[name]}"
        for name in VERSIONS
        if saved["facts"][name] != facts[name]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    problem = callgrind.problem(BUILD)
    if problem:
        print(f"baseline: no instructions can be counted: {problem}", file=sys.stderr)
        return 1
    measured = measure()
    if options.write:
        FILE.write_text(json.dumps({"facts": machine.facts(), "cases": measured}, indent=1) + "\n")
        print(f"baseline: wrote {FILE}")
        return 0
    saved = json.loads(FILE.read_text())
    found = list(problems(saved, measured))
    print("\n".join(found) or "baseline: everything costs what it did")
    if found:
        print(f"{REWRITE} Other versions: {other_versions(saved) or 'none'}.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
