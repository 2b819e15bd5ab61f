"""The parts that `make test-all` adds to `make test`, and which of them a change calls for.

parts.tsv tells for each part the commit that it last passed on. A part is called for when a file that it watches has
changed since. `run.py --parts` writes the table; it is committed with the change.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from check_rows import TableError, read_table
from suites import (
    MINUTES,
    ROOT,
    SANITIZERS,
    UNIT,
    WHEEL,
    Suite,
    catch2,
    ci_suites,
    device_suites,
    googletest,
    late_programs,
    late_python,
    late_rank_tests,
    long_form,
    mutants,
    pytest,
    sanitized_suites,
)

TABLE = Path(__file__).resolve().parent / "parts.tsv"
COLUMNS = ["part", "commit", "minutes", "result"]
LONG_FOLDERS = ("test/python/ranks", "test/python/interop", "test/python/long")
DEVICES = ("test/late_device", "test/thread_group", "test/stream_group")
BUILT = ("csrc", "cmake", "CMakeLists.txt")


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


_PACKAGE = (
    "dev",
    "--target",
    "shardwise",
    "shardwise_python",
    "bound_models",
    "bound_late",
    "gpt",
    "meters",
)

#: Those that find most in the least time come first.
PARTS = [
    Part("ci", (*BUILT, "python", "test", "examples"), 5,
         (*_PACKAGE, "rank_tests", "pretrain", "--install"), ci_suites),
    Part("devices", (*BUILT, "test/cpp", "test/python/ranks", *DEVICES), 6,
         ("dev", "--target", "rank_tests", "shardwise_python", "bound_late", "--install"), device_suites),
    Part("wheel", (*BUILT, "python", "setup.py", "pyproject.toml", "examples/train", UNIT), 4,
         ("dev", "--target", "shardwise", "shardwise_python", "--install"),
         lambda: [pytest("wheel", 20 * MINUTES, WHEEL)]),
    Part("long_ranks", (*BUILT, "test/cpp"), 12, ("dev", "--target", "rank_tests", "long_tests"),
         lambda: [long_form(googletest("long_ranks", "rank_tests", 60 * MINUTES)),
                  googletest("long_tests", "long_tests", 20 * MINUTES)]),
    Part("long_late", (*BUILT, "test/cpp", "test/python/ranks", *DEVICES), 30,
         ("dev", "--target", "rank_tests", "program_tests", "shardwise_python", "bound_late", "--install"),
         lambda: [late_rank_tests("long_late", 60 * MINUTES), late_programs("late_programs", 20 * MINUTES),
                  late_rank_tests("long_shared", 60 * MINUTES, device="late_shared"),
                  late_programs("shared_programs", 20 * MINUTES, "late_shared"),
                  late_python("long_python_late", 30 * MINUTES)]),
    Part("long_python", (*BUILT, "python", "test/python", "examples"), 25, (*_PACKAGE, "--install"),
         lambda: [long_form(pytest("long_python", 90 * MINUTES, *LONG_FOLDERS))]),
    Part("long_programs", (*BUILT, "test/cpp/programs"), 10, ("dev", "--target", "program_tests"),
         lambda: [catch2("long_programs", "program_tests", 60 * MINUTES, "[.long]")]),
    Part("benches", (*BUILT, "python", "benchmarks", "test/python/benches", "test/on_gpu_steps.py"), 11,
         ("dev", "--install"),
         lambda: [pytest("benches", 40 * MINUTES, "test/python/benches")]),
    *(_sanitizer(kind, minutes) for kind, minutes in zip(SANITIZERS, (12, 8, 30), strict=True)),
    Part("mutants", (*BUILT, "python", "test"), 60, (*_PACKAGE, "--install"), lambda: [mutants()]),
]  # fmt: skip


@dataclass(frozen=True)
class Passed:
    """The commit that a part last passed on, what it took, and how many tests it had."""

    commit: str
    minutes: str
    result: str


def read_passed() -> dict[str, Passed]:
    return {
        line["part"]: Passed(line["commit"], line["minutes"], line["result"]) for line in read_table(TABLE, COLUMNS)
    }


def write_passed(part: Part, passed: Passed) -> None:
    try:
        known = read_passed()
    except (OSError, TableError):
        known = {}
    known[part.name] = passed
    rows = [[each.name, *vars(known[each.name]).values()] for each in PARTS if each.name in known]
    TABLE.write_text("".join("\t".join(row) + "\n" for row in [COLUMNS, *rows]))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def current_commit() -> str:
    """The commit with a + where files differ from it."""
    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


def is_called_for(part: Part, passed: Passed | None) -> bool:
    """Also where nobody can tell: it never passed, or on a commit that is not here."""
    if passed is None or not git("cat-file", "-t", passed.commit.rstrip("+")):
        return True
    return bool(git("diff", "--name-only", passed.commit.rstrip("+"), "--", *part.watches))


def in_order(parts: Iterable[Part], called_for: Callable[[Part], bool]) -> list[Part]:
    """Those that a change calls for come first."""
    return sorted(parts, key=lambda part: not called_for(part))


def fits(part: Part, until: float | None) -> bool:
    """Whether it will be done in time, by what it usually takes."""
    return until is None or time.time() + part.minutes * MINUTES <= until
