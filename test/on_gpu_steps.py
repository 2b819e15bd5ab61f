"""The steps of on_gpu.py: what each runs, and what it says of it."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import check_rows
from gtest_slices import run_tests, slice_of, tests_of
from programs import run_program
from reports import FAILED, PASSED, Result, counts, read_catch2, read_junit
from suites import ROOT

sys.path += [str(ROOT / "scripts"), str(ROOT / "benchmarks")]
from gpu import ALLOWS_SEVERAL_RANKS, NCCL_OF_SEVERAL_RANKS, Gpus
from prepare import missing_test_headers

MISSING = "missing"
#: Seconds that a step may take.
LIMIT = 480
BUILD = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")
CPP = BUILD / "test" / "cpp"
RANK_SLICES, PYTHON_SLICES = 6, 4
TEST_DEPS = "install the packages libgtest-dev and catch2, or give their sources: SHARDWISE_TEST_DEPS=FOLDER"


@dataclass(frozen=True)
class Outcome:
    """passed, failed or missing, and in a few words what or why."""

    result: str
    said: str


@dataclass(frozen=True)
class Place:
    """What a step is told: the device, and where its files go."""

    step: str
    device: str
    folder: Path
    only: str = "*"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.step}.json"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.step}.log"

    @property
    def ranks(self) -> str:
        """What SHARDWISE_TEST_DEVICE calls a device that ranks share."""
        return "cuda" if self.device == "cuda" else "late_shared"

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "SHARDWISE_TEST_TIME_LIMIT": "60", **more}

    def run(self, command: Sequence[object], limit: float = LIMIT, **more: str) -> str:
        """How the program failed; empty if it did not."""
        return run_program([str(word) for word in command], self.log, limit, ROOT, self.environment(**more))

    def outcome_of(self, problem: str, good: str) -> Outcome:
        """With the first error that the log names, if it failed."""
        if not problem:
            return Outcome(PASSED, good)
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        error = re.search(r"\w*(?:Error|error): .*", said)
        return Outcome(FAILED, f"{problem}: {error[0]}" if error else problem)


@dataclass(frozen=True)
class Step:
    name: str
    about: str
    run: Callable[[Place], Outcome]


@functools.cache
def gpus() -> Gpus:
    return Gpus.found()


def needs_gpu(run: Callable[[Place], Outcome]) -> Callable[[Place], Outcome]:
    """For a step that needs the GPU, where none stands in for it."""

    def only_with_one(place: Place) -> Outcome:
        if place.device == "cuda" and gpus().count == 0:
            return Outcome(MISSING, "torch finds no GPU here")
        return run(place)

    return only_with_one


def needs_file(file: Path, made_by: str, run: Callable[[Place], Outcome]) -> Callable[[Place], Outcome]:
    def only_with_it(place: Place) -> Outcome:
        if not file.exists():
            return Outcome(MISSING, f"there is no {file.relative_to(ROOT)}: the step {made_by} makes it")
        return run(place)

    return only_with_it


def outcome_of(results: Sequence[Result], ended: str = "") -> Outcome:
    """Skipped tests alone are nothing that has passed."""
    failed = [result.title for result in results if result.outcome == FAILED]
    if failed or ended:
        return Outcome(FAILED, f"{counts(results)}: {', '.join(failed) or ended}")
    if not any(result.outcome == PASSED for result in results):
        reasons = {result.message.strip().splitlines()[-1] for result in results if result.message.strip()}
        return Outcome(MISSING, "; ".join(sorted(reasons)) or "no test ran")
    return Outcome(PASSED, counts(results))


# The build


def builds(options: Sequence[str], targets: Sequence[str]) -> Callable[[Place], Outcome]:
    def build(place: Place) -> Outcome:
        command = [sys.executable, ROOT / "scripts" / "build.py", BUILD.name, *options]
        problem = place.run([*command, "--target", *targets, "--install"])
        if "it was ended after" in problem:
            problem += ": run it again, it goes on where it was"
        return place.outcome_of(problem, " ".join(targets))

    return build


def cuda_support(_place: Place) -> Outcome:
    """What is for GPUs is left out of a build in silence, where something is not there for it."""
    built = (BUILD / "build.ninja").read_text()
    lacking = []
    if "USE_C10D_NCCL" not in built:
        lacking.append("NCCL: torch is a CPU build, or cuda_runtime.h or nccl.h is not there")
    if "kernels.cu.o" not in built:
        lacking.append("our kernels: there is no nvcc; torch's own move the pieces one by one")
    return (
        Outcome(MISSING, "; ".join(lacking)) if lacking else Outcome(PASSED, "NCCL and our kernels are in the library")
    )


def build_tests(place: Place) -> Outcome:
    missing = missing_test_headers()
    wanted = [header for header in missing if "valgrind" not in header]
    if wanted:
        return Outcome(MISSING, f"{' and '.join(wanted)}: {TEST_DEPS}")
    deps = os.environ.get("SHARDWISE_TEST_DEPS", "")
    options = ("-DSHARDWISE_BUILD_TESTS=ON", f"-DSHARDWISE_TEST_DEPS={deps}")
    programs = ("unit_tests", "rank_tests", "late_tests", "bound_models", "bound_files", "bound_late")
    return builds(options, programs)(place)


# Tests


def unit_tests(place: Place) -> Outcome:
    report = place.folder / "unit_tests.xml"
    report.unlink(missing_ok=True)
    ended = place.run([CPP / "unit_tests", "-r", "xml", "-o", report])
    return outcome_of(read_catch2("unit_tests", report) if report.exists() else [], ended)


def rank_filter(only: str) -> str:
    exceptions = check_rows.read_table(check_rows.HERE / "late_exceptions.tsv", ["tests", "reason"])
    return f"{only}-{':'.join(line['tests'] for line in exceptions)}:FullyShardCudaGraph*"


def rank_tests(number: int) -> Callable[[Place], Outcome]:
    def run(place: Place) -> Outcome:
        until = time.monotonic() + LIMIT
        environment = place.environment(SHARDWISE_TEST_DEVICE=place.ranks)
        program = CPP / "rank_tests"
        tests = slice_of(tests_of(program, rank_filter(place.only), environment), number, RANK_SLICES)
        if not tests:
            return Outcome(PASSED, "no test is in this slice of the filter")
        return outcome_of(run_tests(place.step, program, tests, place.log, until, environment))

    return needs_gpu(needs_file(CPP / "rank_tests", "build_tests", run))


def pytest(place: Place, files: Sequence[object], **more: str) -> Outcome:
    report = place.folder / f"{place.step}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", *files, f"--junitxml={report}"]
    ended = place.run(command, LIMIT, **more)
    if not report.exists() and "No module named pytest" in place.log.read_text():
        return Outcome(MISSING, "pytest is not installed")
    return outcome_of(read_junit(place.step, report) if report.exists() else [], ended)


def graph_rows_cpp(place: Place) -> Outcome:
    environment = place.environment()
    tests = tests_of(CPP / "rank_tests", "FullyShardCudaGraph*", environment)
    if not tests:
        return Outcome(MISSING, "this build has no CUDA kernels, so the test is not in it")
    until = time.monotonic() + LIMIT
    return outcome_of(run_tests(place.step, CPP / "rank_tests", tests, place.log, until, environment))


def graph_rows_python(place: Place) -> Outcome:
    return pytest(place, ["test/python/ranks/test_fully_shard_training_cuda_graph.py"])


def python_rows(number: int) -> Callable[[Place], Outcome]:
    """Their ranks are processes on the CPU; tests that need a GPU run where there is one."""

    def run(place: Place) -> Outcome:
        files = slice_of(sorted(map(str, (ROOT / "test/python/ranks").glob("test_*.py"))), number, PYTHON_SLICES)
        return pytest(place, files, SHARDWISE_TEST_ROWS="1")

    return run


def python_on_device(place: Place) -> Outcome:
    """The rows whose models follow the device, over the direct transport."""
    return pytest(place, ["test/python/ranks"], SHARDWISE_TEST_DEVICE=place.device)


# NCCL


def torchrun(ranks: int, *words: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words]


def trains_as_by_hand(place: Place, ranks: int, **more: str) -> str:
    device = "cuda" if place.device == "cuda" else "cpu"
    return place.run(torchrun(ranks, ROOT / "test" / "nccl_ranks.py", "--device", device), LIMIT / 2, **more)


def over(place: Place) -> str:
    return "over NCCL" if place.device == "cuda" else "on the CPU, over shardwise's transport"


def nccl_one_rank(place: Place) -> Outcome:
    return place.outcome_of(trains_as_by_hand(place, 1), f"Python, 1 rank {over(place)}")


def nccl_several_ranks(place: Place) -> Outcome:
    found = gpus()
    if place.device == "cuda" and found.count < 2 and found.nccl < NCCL_OF_SEVERAL_RANKS:
        version = ".".join(map(str, found.nccl))
        return Outcome(MISSING, f"there is one GPU, and NCCL {version} takes one rank on each (2.30 would take more)")
    ranks = max(2, found.count)
    problem = trains_as_by_hand(place, ranks, **{ALLOWS_SEVERAL_RANKS: "1"})
    return place.outcome_of(problem, f"Python, {ranks} ranks {over(place)}")


def nccl_cpp(place: Place) -> Outcome:
    """One rank; examples/demo.py compares it with a process that has no ranks, in both ways to wrap."""
    command = [sys.executable, "examples/demo.py", "--front", "cpp", "--mode", "fully_shard", "--ranks", "1", "--short"]
    problem = place.run([*command, "--out", place.folder / "demo"])
    return place.outcome_of(problem, f"C++, 1 rank {over(place)}")


# Figures


def bench(suite: str) -> Callable[[Place], Outcome]:
    def run(place: Place) -> Outcome:
        command = [sys.executable, "benchmarks/run.py", "--quick", "--suites", suite, "--save"]
        problem = place.run([*command, "--results", place.folder], LIMIT, **{ALLOWS_SEVERAL_RANKS: "1"})
        said = place.log.read_text(errors="replace")
        number = re.findall(r"^(\d+) figures in", said, re.MULTILINE)
        nothing = re.findall(r"^.*nothing was measured: (.*)$", said, re.MULTILINE)
        if not problem and nothing and number == ["0"]:
            return Outcome(MISSING, nothing[0])
        if not problem and number in ([], ["0"]):
            problem = "nothing was measured"
        return place.outcome_of(problem, f"{number[0] if number else 'no'} figures")

    return run


def profile(place: Place) -> Outcome:
    """On the CPU of a small model: it stands in for a device that torch's profiler knows."""
    words: list[object] = ["--device", "cuda"]
    if place.device != "cuda":
        words = ["--device", "cpu", "--layers", 2, "--width", 64, "--heads", 2, "--batch", 1, "--length", 32]
    out = place.folder / "profile"
    problem = place.run([sys.executable, "benchmarks/python/profile_step.py", "--out", out, *words])
    return place.outcome_of(problem, f"{out}/step.svg, step.md")


_MEASURED = ("meters", "host_cost", "memory_steps", "rank_steps", "modelled_peers")
STEPS = [
    Step("build_library", "the library and the Python package",
         builds((), ("shardwise", "shardwise_python"))),
    Step("build_has_cuda", "NCCL and our kernels are in the library",
         needs_file(BUILD / "build.ninja", "build_library", cuda_support)),
    Step("build_tests", "the test programs", build_tests),
    Step("build_programs", "benchmarks and the example",
         builds(("-DSHARDWISE_BUILD_BENCHMARKS=ON", "-DSHARDWISE_BUILD_EXAMPLES=ON"), (*_MEASURED, "gpt"))),
    Step("unit_tests", "what needs no ranks", needs_file(CPP / "unit_tests", "build_tests", unit_tests)),
    *(Step(f"rank_tests_{n}", f"rank tests in C++, ranks are threads on one GPU: slice {n} of {RANK_SLICES}",
           rank_tests(n)) for n in range(1, RANK_SLICES + 1)),
    Step("nccl_one_rank", "one rank over NCCL trains as by hand", needs_gpu(nccl_one_rank)),
    Step("nccl_several_ranks", "ranks on all GPUs, or two on one, train as by hand", needs_gpu(nccl_several_ranks)),
    Step("nccl_cpp", "a C++ program over NCCL trains as one process does",
         needs_gpu(needs_file(BUILD / "examples" / "cpp" / "gpt", "build_programs", nccl_cpp))),
    Step("graph_rows_cpp", "a step in a CUDA graph, in C++",
         needs_gpu(needs_file(CPP / "rank_tests", "build_tests", graph_rows_cpp))),
    Step("graph_rows_python", "a step in a CUDA graph, in Python", needs_gpu(graph_rows_python)),
    *(Step(f"python_rows_{n}", f"rows in Python: slice {n} of {PYTHON_SLICES}", needs_gpu(python_rows(n)))
      for n in range(1, PYTHON_SLICES + 1)),
    Step("python_on_device", "rows in Python, ranks are processes that share a GPU", needs_gpu(python_on_device)),
    *(Step(f"bench_{suite}", f"figures of the suite {suite}, in short",
           needs_gpu(needs_file(BUILD / "benchmarks" / "cpp" / "rank_steps", "build_programs", bench(suite))))
      for suite in ("host", "steps", "memory", "gpu")),
    Step("profile", "a picture and a table of one step: copies, gaps, streams, the host's time", needs_gpu(profile)),
]  # fmt: skip
