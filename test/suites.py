"""The programs that run tests: those of `make test`, and those of the parts that `make test-all` adds.

`make test` leaves to `.ci/run` the tests of ci.tsv, each with the reason why a change seldom needs it. A line names a
test by its title, with or without parameters, or by how titles begin, with a * at the end. SHARDWISE_TEST_TIER chooses
for pytest: `change` runs what `make test` runs, `ci` the rest; without it all run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tables
from check_rows import HERE, read_rows
from programs import ROOT
from reports import Result, read_closing_line, read_junit

OUT = ROOT / "build" / "test"
PROGRAMS = ROOT / "build" / "dev" / "test" / "cpp"
MINUTES = 60
#: Those that the rows of rows.tsv are in.
ROW_SUITES = {"rank_tests", "python_ranks", "python_interop"}
UNIT = "test/python/unit"
#: The wheel, installed in new environments: a part of its own.
WHEEL = f"{UNIT}/test_package.py"
PACKAGE_TESTS = ("import", "install", "install_variable", "package", "public_names")
#: Those that run in `devices` with all ranks on one device: some of everything, within a minute.
SHARED_ROWS = ":".join(
    f"{name}*" for name in (
        "ReplicateGradients.", "ReplicateContract.", "FullyShard1DTrainingCore.TrainParitySingleGroup",
        "FullyShard1DTrainingCompose.PartialGroup", "FullyShardForwardInputs.", "FullyShardMixedPrecisionCasts.",
        "FullyShardRegisteredParams.", "HeldTensors.", "UsersCollectives.AlongBothAxes")
)  # fmt: skip
#: Those in Python that run there on the late device: what costs less than a quarter of a minute.
LATE_PYTHON_ROWS = "not explicit_prefetching and not async_op and not (FullyShard and optim_event)"
LATE = {"SHARDWISE_TEST_DEVICE": "late"}
SANITIZERS = {
    # torch itself leaks, and its libraries are not instrumented.
    "address": {"ASAN_OPTIONS": "detect_leaks=0"},
    "undefined": {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": f"suppressions={ROOT / 'test' / 'tsan.supp'}:ignore_noninstrumented_modules=1"},
}


@dataclass(frozen=True)
class Suite:
    """A program that runs tests and writes a report, in at most `limit` seconds."""

    name: str
    command: list[str]
    read: Callable[[str, Path], list[Result]]
    limit: int
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Its name without the number of a slice."""
        return re.sub(r"_\d$", "", self.name)

    def file(self, ending: str) -> Path:
        """Its report (xml) or log."""
        return OUT / f"{self.name}.{ending}"


def catch2(name: str, program: str, minutes: int, *arguments: str, **environment: str) -> Suite:
    command = [str(PROGRAMS / program), "-r", "junit", "-o", str(OUT / f"{name}.xml"), *arguments]
    return Suite(name, command, read_junit, minutes * MINUTES, environment)


def googletest(name: str, program: str, minutes: int, chosen: str = "*", **environment: str) -> Suite:
    command = [str(PROGRAMS / program), f"--gtest_output=xml:{OUT / name}.xml", f"--gtest_filter={chosen}"]
    return Suite(name, command, read_junit, minutes * MINUTES, environment)


def in_slices(name: str, program: str, minutes: int, chosen: str, **environment: str) -> list[Suite]:
    """Two that run beside each other: their ranks mostly wait, for each other and for what is late on purpose."""
    return [googletest(f"{name}_{index + 1}", program, minutes, chosen, GTEST_TOTAL_SHARDS="2",
                       GTEST_SHARD_INDEX=str(index), **environment) for index in range(2)]  # fmt: skip


def pytest(name: str, minutes: int, *what: str, **environment: str) -> Suite:
    # Only a test that fails has its stderr in the report.
    report = [f"--junitxml={OUT / name}.xml", "-o", "junit_logging=system-err", "-o", "junit_log_passing_tests=false"]
    command = [sys.executable, "-m", "pytest", "-v", *what, *report]
    return Suite(name, command, read_junit, minutes * MINUTES, environment)


def ci_names(python: bool) -> list[str]:
    """Those of ci.tsv in C++ or in Python, where the names of tests begin with their kind."""
    lines = [line["test"] for line in tables.read(HERE / "ci.tsv")]
    return [name for name in lines if name.startswith(("Test", "test_")) == python]


def is_among(title: str, names: list[str]) -> bool:
    forms = (title, title.split("[")[0])
    return any(name in forms or (name.endswith("*") and title.startswith(name[:-1])) for name in names)


def late_filter(only: str = "*") -> str:
    """The C++ tests whose ranks may be on late devices: all but those of late_exceptions.tsv."""
    exceptions = tables.read(HERE / "late_exceptions.tsv")
    return f"{only}-{':'.join(line['tests'] for line in exceptions)}"


def row_filter() -> str:
    """The C++ tests of rows.tsv, as a filter of GoogleTest's."""
    titles = [row.title for row in read_rows(HERE / "rows.tsv") if row.language == "cpp"]
    # An instance's or a type's name may stand on either side of the class.
    forms = [form for title in titles for form in (title, f"{title}/*", f"*/{title}", title.replace(".", "/*."))]
    return ":".join(forms)


def late_mutant_filter() -> str:
    """The C++ tests that notice a mutant on the late device."""
    noticed = (line["cpp"].partition(" (") for line in tables.read(HERE / "mutants.tsv"))
    return ":".join(test for test, _, how in noticed if "late" in how)


def product_suites(rows_only: bool = False) -> list[Suite]:
    """What `make test` runs; the longest first, for they run beside each other. Or, of the suites that have nearly all
    rows of rows.tsv, these tests alone; of python_unit then those of the package."""
    ranks = row_filter() if rows_only else f"*-{':'.join(ci_names(python=False))}"
    tier = {} if rows_only else {"SHARDWISE_TEST_TIER": "change"}
    package = [f"{UNIT}/test_{name}.py" for name in PACKAGE_TESTS]
    # Rows alone need no examples.
    without_examples = ["--ignore=test/python/interop/test_pretrain.py"] if rows_only else []
    return [
        *in_slices("rank_tests", "rank_tests", 40, ranks),
        pytest("python_ranks", 25, "test/python/ranks", **({"SHARDWISE_TEST_ROWS": "1"} if rows_only else tier)),
        pytest("python_interop", 25, "test/python/interop", *without_examples, **tier),
        pytest("python_unit", 20, *(package if rows_only else (UNIT, f"--ignore={WHEEL}")), **tier),
        catch2("program_tests", "program_tests", 10),
        googletest("late_tests", "late_tests", 5),
        catch2("unit_tests", "unit_tests", 5),
    ]


def fresh_clone() -> Suite:
    """The README's commands in short, in a clone of the last commit, as a user runs them who has just opened a shell:
    with nothing of this run's make, build folder or package."""
    clone = OUT / "fresh_clone"
    dropped = ("MAKE", "MFLAGS", "SHARDWISE_", "PYTHONPATH", "VIRTUAL_ENV", "GIT_", "FRESH_CLONE", "BUDGETS")
    names = [name for name in os.environ if name.startswith(dropped) and not name.endswith("_DEPS")]
    make = f"env {' '.join(f'-u {name}' for name in names)} make -C {clone} PYTHON={sys.executable}"
    script = f"git clone --quiet {ROOT} {clone} && {make} demo SHORT=1 && {make} test SUITES=unit_tests"
    return Suite("fresh_clone", ["sh", "-c", f"rm -rf {clone}; {script}"], read_closing_line, 30 * MINUTES)


def ci_suites() -> list[Suite]:
    """What `make test` leaves to `.ci/run`: the tests of ci.tsv."""
    return [
        # Beside each other: their ranks mostly wait.
        *(
            pytest(f"python_ci_{kind}", 30, f"test/python/{kind}", f"--ignore={WHEEL}", SHARDWISE_TEST_TIER="ci")
            for kind in ("interop", "ranks", "unit")
        ),
        googletest("rank_ci", "rank_tests", 20, ":".join(ci_names(python=False))),
    ]


def device_suites() -> list[Suite]:
    """Rows, and what notices mutants there, with ranks on late devices, or all on one (late_shared)."""
    late = late_filter(f"{row_filter()}:{late_mutant_filter()}")
    return [
        *in_slices("late_rows", "rank_tests", 15, late, **LATE),
        googletest("shared_rows", "rank_tests", 10, late_filter(SHARED_ROWS), SHARDWISE_TEST_DEVICE="late_shared"),
        pytest("python_late", 10, "test/python/ranks", "-k", LATE_PYTHON_ROWS, **LATE),
    ]


def long_late_suites() -> list[Suite]:
    shared = {"SHARDWISE_TEST_DEVICE": "late_shared"}
    return [
        googletest("long_late", "rank_tests", 60, late_filter(), **LATE),
        catch2("late_programs", "program_tests", 20, **LATE),
        googletest("long_shared", "rank_tests", 60, late_filter(), **shared),
        catch2("shared_programs", "program_tests", 20, **shared),
        pytest("long_python_late", 30, "test/python/ranks", **LATE),
    ]


def sanitized_suites(kind: str) -> list[Suite]:
    """The programs of build/dev with the library of build/KIND in the place of theirs."""
    folder = ROOT / "build" / kind / "csrc"
    linked = subprocess.run(["ldd", folder / "libshardwise.so"], capture_output=True, text=True, check=True).stdout
    # A program that is not built with it must load it before all else; the one for undefined behaviour need not.
    runtime = re.findall(r"=> (\S+/lib[at]san\S+)", linked)
    preloaded = {"LD_PRELOAD": runtime[0]} if runtime else {}
    # All is many times slower with it.
    limit = {"SHARDWISE_TEST_TIME_LIMIT": "900"}
    environment = {"LD_LIBRARY_PATH": str(folder), **limit, **preloaded, **SANITIZERS[kind]}
    return [
        catch2(f"unit_tests-{kind}", "unit_tests", 10, **environment),
        # Walks counts functions on stacks, of which a sanitizer's build has more.
        googletest(f"rank_tests-{kind}", "rank_tests", 60, "-Walks.*", **environment),
        catch2(f"program_tests-{kind}", "program_tests", 20, **environment),
    ]
