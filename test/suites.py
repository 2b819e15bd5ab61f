"""The programs that run tests: those of `make test`, and those of the parts that `make test-all` adds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import check_rows
import tiers
from reports import Result, read_catch2, read_closing_line, read_junit

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "test"
PROGRAMS = ROOT / "build" / "dev" / "test" / "cpp"
MINUTES = 60
#: Those that the rows of rows.tsv are in.
ROW_SUITES = {"rank_tests", "python_ranks", "python_interop"}
UNIT = "test/python/unit"
#: The wheel, installed in new environments: a part of its own.
WHEEL = f"{UNIT}/test_package.py"
PACKAGE_TESTS = ("import", "install", "install_patches", "install_variable", "package", "public_names")
#: Those that run in `devices` with all ranks on one device: some of everything, within a minute.
SHARED_ROWS = ":".join(
    f"{name}*" for name in (
        "ReplicateGradients.", "ReplicateContract.", "FullyShard1DTrainingCore.TrainParitySingleGroup",
        "FullyShard1DTrainingCompose.PartialGroup", "FullyShardForwardInputs.", "FullyShardMixedPrecisionCasts.",
        "FullyShardRegisteredParams.", "HeldTensors.", "UsersCollectives.AlongBothAxes")
)  # fmt: skip
#: Those in Python that run there on the late device: what costs less than a quarter of a minute.
LATE_PYTHON_ROWS = (
    "not explicit_prefetching and not async_op and not (multi_group and (3 or 4)) and not (FullyShard and optim_event)"
)
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
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Its name without the number of a slice."""
        return re.sub(r"_\d$", "", self.name)

    @property
    def report(self) -> Path:
        return OUT / f"{self.name}.xml"

    @property
    def log(self) -> Path:
        return OUT / f"{self.name}.log"

    @property
    def seconds(self) -> Path:
        return OUT / f"{self.name}.seconds"


def catch2(name: str, program: str, limit: int, *arguments: str) -> Suite:
    command = [str(PROGRAMS / program), "-r", "xml", "-o", str(OUT / f"{name}.xml"), *arguments]
    return Suite(name, command, read_catch2, limit)


def googletest(name: str, program: str, limit: int) -> Suite:
    return Suite(name, [str(PROGRAMS / program), f"--gtest_output=xml:{OUT / name}.xml"], read_junit, limit)


def late_rank_tests(name: str, limit: int, only: str = "*", device: str = "late") -> Suite:
    """rank_tests with ranks on late devices, or all on one (late_shared), but for those of late_exceptions.tsv."""
    exceptions = check_rows.read_table(check_rows.HERE / "late_exceptions.tsv", ["tests", "reason"])
    suite = googletest(name, "rank_tests", limit)
    chosen = f"--gtest_filter={only}-{':'.join(line['tests'] for line in exceptions)}"
    return replace(suite, command=[*suite.command, chosen], environment={"SHARDWISE_TEST_DEVICE": device})


def late_programs(name: str, limit: int, device: str = "late") -> Suite:
    """program_tests with ranks on late devices, or all on one."""
    return replace(catch2(name, "program_tests", limit), environment={"SHARDWISE_TEST_DEVICE": device})


def late_python(name: str, limit: int, *chosen: str) -> Suite:
    """Rows of Python with ranks on the late device."""
    suite = pytest(name, limit, "test/python/ranks", *chosen)
    return replace(suite, environment={"SHARDWISE_TEST_DEVICE": "late"})


def row_filter() -> str:
    """The C++ tests of rows.tsv, as a filter of GoogleTest's."""
    rows = check_rows.read_rows(check_rows.HERE / "rows.tsv")
    titles = [row.title for row in rows if row.language == "cpp"]
    # An instance's or a type's name may stand on either side of the class.
    forms = [form for title in titles for form in (title, f"{title}/*", f"*/{title}", title.replace(".", "/*."))]
    return ":".join(forms)


def pytest(name: str, limit: int, *what: str) -> Suite:
    # Only a test that fails has its stderr in the report.
    report = [f"--junitxml={OUT / name}.xml", "-o", "junit_logging=system-err", "-o", "junit_log_passing_tests=false"]
    return Suite(name, [sys.executable, "-m", "pytest", "-v", *what, *report], read_junit, limit)


def product_suites() -> list[Suite]:
    """What `make test` runs; the longest first, for they run beside each other."""
    change = {"SHARDWISE_TEST_TIER": "change"}
    return [
        rank_tests_slice(1, of=2),
        rank_tests_slice(2, of=2),
        replace(pytest("python_ranks", 25 * MINUTES, "test/python/ranks"), environment=change),
        replace(pytest("python_interop", 25 * MINUTES, "test/python/interop"), environment=change),
        replace(pytest("python_unit", 20 * MINUTES, UNIT, f"--ignore={WHEEL}"), environment=change),
        catch2("program_tests", "program_tests", 10 * MINUTES),
        googletest("late_tests", "late_tests", 5 * MINUTES),
        catch2("unit_tests", "unit_tests", 5 * MINUTES),
    ]


def rank_tests_slice(number: int, of: int) -> Suite:
    """One of so many slices: their ranks mostly wait for each other, and for what is late on purpose."""
    suite = googletest(f"rank_tests_{number}", "rank_tests", 40 * MINUTES)
    chosen = f"--gtest_filter=*-{':'.join(tiers.names(python=False))}"
    shard = {"GTEST_TOTAL_SHARDS": str(of), "GTEST_SHARD_INDEX": str(number - 1)}
    return replace(suite, command=[*suite.command, chosen], environment=shard)


def ci_suites() -> list[Suite]:
    """What `make test` leaves to `.ci/run`: the tests of ci.tsv."""
    python = pytest("python_ci", 30 * MINUTES, "test/python/ranks", "test/python/interop", UNIT, f"--ignore={WHEEL}")
    ranks = googletest("rank_ci", "rank_tests", 20 * MINUTES)
    return [
        replace(python, environment={"SHARDWISE_TEST_TIER": "ci"}),
        replace(ranks, command=[*ranks.command, f"--gtest_filter={':'.join(tiers.names(python=False))}"]),
    ]


def device_suites() -> list[Suite]:
    """Rows on devices other than the CPU."""
    return [
        late_rank_tests("late_rows", 15 * MINUTES, row_filter()),
        late_rank_tests("shared_rows", 10 * MINUTES, SHARED_ROWS, "late_shared"),
        late_python("python_late", 10 * MINUTES, "-k", LATE_PYTHON_ROWS),
    ]


def rows_only(suite: Suite) -> Suite:
    """Of the suites that have nearly all rows of rows.tsv, these tests alone; of python_unit, those of the package."""
    if suite.family == "rank_tests":
        return replace(suite, command=[*suite.command[:-1], f"--gtest_filter={row_filter()}"])
    if suite.name == "python_unit":
        files = [f"test/python/unit/test_{name}.py" for name in PACKAGE_TESTS]
        rest = [part for part in suite.command if part not in (UNIT, f"--ignore={WHEEL}")]
        return replace(suite, command=[*rest, *files], environment={})
    if suite.name == "python_interop":
        return replace(suite, environment={})
    return replace(suite, environment={"SHARDWISE_TEST_ROWS": "1"}) if suite.name == "python_ranks" else suite


def long_form(suite: Suite) -> Suite:
    """The suite at more ranks, with more steps and more random programs."""
    return replace(suite, environment={"SHARDWISE_TEST_FORM": "long"})


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
    suites = [
        catch2(f"unit_tests-{kind}", "unit_tests", 10 * MINUTES),
        googletest(f"rank_tests-{kind}", "rank_tests", 60 * MINUTES),
        catch2(f"program_tests-{kind}", "program_tests", 20 * MINUTES),
    ]
    return [replace(suite, environment=environment) for suite in suites]


def mutants() -> Suite:
    command = [sys.executable, str(ROOT / "test" / "mutants" / "run.py")]
    return Suite("mutants", command, read_closing_line, 180 * MINUTES)
