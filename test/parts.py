"""The parts that `make test-all` adds to `make test`, and which of them a change calls for.

parts.tsv tells for each part the commit that it last passed on. A part is called for when a file that it watches has
changed since. `run.py --parts` writes the table; it is committed with the change.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from check_rows import HERE
from programs import git
from reports import read_closing_line
from suites import (
    MINUTES,
    SANITIZERS,
    UNIT,
    WHEEL,
    Suite,
    catch2,
    ci_suites,
    device_suites,
    googletest,
    long_late_suites,
    pytest,
    sanitized_suites,
)

TABLE = HERE / "parts.tsv"
DEVICES = ("test/late_device", "test/thread_group", "test/stream_group")
BUILT = ("csrc", "cmake", "CMakeLists.txt")
LONG = {"SHARDWISE_TEST_FORM": "long", "SHARDWISE_TEST_TIME_LIMIT": "600"}


@dataclass(frozen=True)
class Part:
    """Tests of one kind: what they watch, roughly how long they take, what is built for them, and what runs."""

    name: str
    watches: tuple[str, ...]
    minutes: int
    build: tuple[str, ...]
    suites: Callable[[], list[Suite]]


def _sanitizer(kind: str, minutes: int) -> Part:
    build = (kind, "-DSHARDWISE_BUILD_PYTHON=OFF", f"-DSHARDWISE_SANITIZE={kind}", "--target", "shardwise")
    return Part(kind, (*BUILT, "test/cpp"), minutes, build, lambda: sanitized_suites(kind))


_PACKAGE = ("dev", "--install", "--target", "shardwise", "shardwise_python", "bound_models",
            "bound_late", "gpt", "meters")  # fmt: skip

#: Those that find most in the least time come first.
PARTS = [
    Part("ci", (*BUILT, "python", "test", "examples"), 5, (*_PACKAGE, "rank_tests", "pretrain"), ci_suites),
    Part("devices", (*BUILT, "test/cpp", "test/python/ranks", *DEVICES), 6,
         ("dev", "--target", "rank_tests", "shardwise_python", "bound_late", "--install"), device_suites),
    Part("wheel", (*BUILT, "python", "setup.py", "pyproject.toml", "examples/train", UNIT), 4,
         ("dev", "--target", "shardwise", "shardwise_python", "--install"), lambda: [pytest("wheel", 20, WHEEL)]),
    Part("long_ranks", (*BUILT, "test/cpp"), 12, ("dev", "--target", "rank_tests"),
         lambda: [googletest("long_ranks", "rank_tests", 60, **LONG)]),
    Part("long_late", (*BUILT, "test/cpp", "test/python/ranks", *DEVICES), 30,
         ("dev", "--target", "rank_tests", "program_tests", "shardwise_python", "bound_late", "--install"),
         long_late_suites),
    Part("long_python", (*BUILT, "python", "test/python", "examples"), 25, _PACKAGE,
         lambda: [pytest("long_python", 90, *(f"test/python/{name}" for name in ("ranks", "interop", "long")),
                         **LONG)]),
    Part("long_programs", (*BUILT, "test/cpp/programs"), 10, ("dev", "--target", "program_tests"),
         lambda: [catch2("long_programs", "program_tests", 60, "[.long]")]),
    Part("benches", (*BUILT, "python", "benchmarks", "test/python/benches", "test/on_gpu_steps.py"), 11,
         ("dev", "--install"), lambda: [pytest("benches", 40, "test/python/benches")]),
    *(_sanitizer(kind, minutes) for kind, minutes in zip(SANITIZERS, (20, 16, 20), strict=True)),
    Part("mutants", (*BUILT, "python", "test"), 60, _PACKAGE,
         lambda: [Suite("mutants", [sys.executable, "test/mutants/run.py"], read_closing_line, 180 * MINUTES)]),
]  # fmt: skip


def pace(passed: Mapping[str, Mapping[str, str]], commit: str) -> float:
    """How many times as long parts take here and now, by those that passed on this commit; at least once."""
    rows = [(part, passed[part.name]) for part in PARTS if part.name in passed]
    shares = [float(row["minutes"]) / part.minutes for part, row in rows if row["commit"].rstrip("+") == commit]
    return max(1.0, statistics.median(shares)) if shares else 1.0


def is_called_for(part: Part, passed: str | None) -> bool:
    """Also where nobody can tell: it never passed, or on a commit that is not here."""
    commit = (passed or "").rstrip("+")
    if not commit or not git("cat-file", "-t", commit):
        return True
    return bool(git("diff", "--name-only", commit, "--", *part.watches))
