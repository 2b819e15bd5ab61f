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
from reports import FAILED, PASSED, SKIPPED, Result, counts, read_catch2
from suites import ROOT

sys.path += [str(ROOT / "scripts"), str(ROOT / "benchmarks")]
from gpu import ALLOWS_SEVERAL_RANKS, NCCL_OF_SEVERAL_RANKS, Gpus
from prepare import missing_test_headers

MISSING = "missing"
#: Seconds that a build may take.
BUILD_LIMIT = 480
BUILD = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")
CPP = BUILD / "test" / "cpp"
BENCHMARKS = BUILD / "benchmarks" / "cpp"
#: An NCCL that several ranks may share a GPU with, where the kit brought one.
NCCL = ROOT / "build" / "kit" / "libnccl.so.2"
RANK_SLICES = 8
TEST_DEPS = "install the packages libgtest-dev and catch2, or give their sources: SHARDWISE_TEST_DEPS=FOLDER"


@dataclass(frozen=True)
class Outcome:
    """passed, failed or missing, and in a few words what or why."""

    result: str
    said: str


@dataclass(frozen=True)
class Place:
    """What a step is told: the device, where its files go, and the seconds it may take."""

    step: str
    device: str
    folder: Path
    only: str = "*"
    limit: float = BUILD_LIMIT

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
        return {"SHARDWISE_TEST_TIME_LIMIT": "60", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **more}

    def run(self, command: Sequence[object], **more: str) -> str:
        """How the program failed; empty if it did not."""
        return run_program([str(word) for word in command], self.log, self.limit, ROOT, self.environment(**more))

    def outcome_of(self, problem: str, good: str) -> Outcome:
        """With the first error that the log names, if it failed."""
        if not problem:
            return Outcome(PASSED, good)
        error = re.search(r"\w*(?:Error|error): .*", self.said())
        return Outcome(FAILED, f"{problem}: {error[0]}" if error else problem)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass(frozen=True)
class Step:
    """`limit`: seconds that it may take."""

    name: str
    about: str
    limit: int
    run: Callable[[Place], Outcome]


@functools.cache
def gpus() -> Gpus:
    return Gpus.found({**os.environ, **shared_gpu()})


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
        if NCCL.parent.exists():
            return Outcome(PASSED, "the kit has it")
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
    programs = ("unit_tests", "rank_tests", "late_tests", "bound_models", "bound_late")
    return builds(options, programs)(place)


# Tests


def unit_tests(place: Place) -> Outcome:
    report = place.folder / "unit_tests.xml"
    report.unlink(missing_ok=True)
    ended = place.run([CPP / "unit_tests", "-r", "xml", "-o", report])
    return outcome_of(read_catch2("unit_tests", report) if report.exists() else [], ended)


#: Of rank_tests, those that steps of their own run, and what torch computes on CPUs alone: a LayerNorm whose weights
#: have another dtype than its input.
NOT_ON_GPUS = "FullyShardCudaGraph*:ParameterDtypes.SomeAreKept"


def rank_filter(only: str) -> str:
    exceptions = check_rows.read_table(check_rows.HERE / "late_exceptions.tsv", ["tests", "reason"])
    return f"{only}-{':'.join(line['tests'] for line in exceptions)}:{NOT_ON_GPUS}"


def gtests(place: Place, program: Path, tests: Sequence[str], **more: str) -> Outcome:
    until = time.monotonic() + place.limit - 2
    return outcome_of(run_tests(place.step, program, tests, place.log, until, place.environment(**more)))


def rank_tests(number: int) -> Callable[[Place], Outcome]:
    def run(place: Place) -> Outcome:
        device = {"SHARDWISE_TEST_DEVICE": place.ranks}
        program = CPP / "rank_tests"
        listed = tests_of(program, rank_filter(place.only), place.environment(**device))
        tests = slice_of(listed, number, RANK_SLICES)
        if not tests:
            return Outcome(PASSED, "no test is in this slice of the filter")
        # A test of theirs is of processes over NCCL.
        return gtests(place, program, tests, **device, **shared_gpu())

    return needs_gpu(needs_file(CPP / "rank_tests", "build_tests", run))


#: What pytest -v says of a test. One that was running at the limit has no word behind its name. Why tests were skipped
#: stands at the end, with -rs.
PYTEST = re.compile(
    r"^(\S+::\S+(?: \S+)*?) *(PASSED|FAILED|ERROR|SKIPPED)?(?: \(.*\))?(?: +\[ *\d+%\])?$", re.MULTILINE
)
SKIPS = re.compile(r"^SKIPPED \[\d+\] \S+: (.*)$", re.MULTILINE)


def read_pytest(suite: str, said: str) -> list[Result]:
    words = {"PASSED": PASSED, "SKIPPED": SKIPPED}
    messages = {"": "it did not end", "SKIPPED": "; ".join(SKIPS.findall(said))}
    return [
        Result(suite, "", name, words.get(word, FAILED), messages.get(word, "")) for name, word in PYTEST.findall(said)
    ]


def pytest(place: Place, files: Sequence[object], **more: str) -> Outcome:
    options = ["-v", "-rs", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={place.limit / 2:g}"]
    ended = place.run([sys.executable, "-m", "pytest", *options, *files], **more)
    if "No module named pytest" in place.said():
        return Outcome(MISSING, "pytest is not installed")
    found = read_pytest(place.step, place.said())
    return outcome_of(found, ended)


def graph_rows_cpp(place: Place) -> Outcome:
    tests = tests_of(CPP / "rank_tests", "FullyShardCudaGraph*", place.environment())
    if not tests:
        return Outcome(MISSING, "this build has no CUDA kernels, so the test is not in it")
    return gtests(place, CPP / "rank_tests", tests)


def graph_rows_python(place: Place) -> Outcome:
    return pytest(place, ["test/python/ranks/test_fully_shard_training_cuda_graph.py"])


def python_on_device(place: Place) -> Outcome:
    """The rows whose models follow the device, over the direct transport."""
    return pytest(place, ["test/python/ranks"], SHARDWISE_TEST_DEVICE=place.device)


def python_rows(place: Place) -> Outcome:
    """Their ranks are processes on the CPU; tests that need a GPU run where there is one."""
    return pytest(place, ["test/python/ranks"], SHARDWISE_TEST_ROWS="1")


def moves(place: Place) -> Outcome:
    """What moves pieces, beside torch's operations, and beside a copy of torch's."""
    words = ["--device", "cuda", "--large", 1] if place.device == "cuda" else ["--megabytes", 20]
    problem = place.run([BENCHMARKS / "moves", *words])
    ratios = [float(found) for found in re.findall(r"GB/s +([\d.]+) of a copy", place.said())]
    return place.outcome_of(problem, f"as torch computes; {min(ratios, default=0)} of a copy's speed and more")


def sanitizer(tool: str, tests: str) -> Callable[[Place], Outcome]:
    def run(place: Place) -> Outcome:
        if place.device != "cuda":
            return Outcome(MISSING, "compute-sanitizer needs a GPU")
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", 9, CPP / "rank_tests"]
        problem = place.run([*command, f"--gtest_filter={tests}"], SHARDWISE_TEST_DEVICE="cuda")
        if "could not be started" in problem:
            return Outcome(MISSING, "there is no compute-sanitizer")
        return place.outcome_of(problem, tests)

    return needs_gpu(needs_file(CPP / "rank_tests", "build_tests", run))


# NCCL


def torchrun(ranks: int, *words: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words]


def shared_gpu() -> dict[str, str]:
    """So that several ranks may share a GPU, where NCCL can do that: few blocks each, for all must fit at once."""
    preloaded = {"LD_PRELOAD": str(NCCL)} if NCCL.exists() else {}
    return {ALLOWS_SEVERAL_RANKS: "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", **preloaded}


def trains_beside_others(place: Place, ranks: int, *words: str, **more: str) -> str:
    device = "cuda" if place.device == "cuda" else "cpu"
    return place.run(torchrun(ranks, ROOT / "test" / "nccl_ranks.py", "--device", device, *words), **more)


def ways(place: Place) -> str:
    return f"{place.said().count('the same: ')} ways"


def over(place: Place) -> str:
    return "over NCCL" if place.device == "cuda" else "on the CPU, over shardwise's transport"


def nccl_one_rank(place: Place) -> Outcome:
    problem = trains_beside_others(place, 1)
    return place.outcome_of(problem, f"Python, 1 rank {over(place)}, {ways(place)}")


def nccl_several_ranks(place: Place) -> Outcome:
    found = gpus()
    if place.device == "cuda" and found.count < 2 and found.nccl < NCCL_OF_SEVERAL_RANKS:
        version = ".".join(map(str, found.nccl))
        return Outcome(MISSING, f"there is one GPU, and NCCL {version} takes one rank on each (2.30 would take more)")
    ranks = max(2, found.count)
    more = shared_gpu() if place.device == "cuda" and found.count < ranks else {}
    problem = trains_beside_others(place, ranks, **more)
    return place.outcome_of(problem, f"Python, {ranks} ranks {over(place)}, {ways(place)}")


def direct_several_ranks(place: Place) -> Outcome:
    problem = trains_beside_others(place, 2, "--direct")
    return place.outcome_of(problem, f"Python, 2 ranks over the direct transport, {ways(place)}")


def nccl_cpp(place: Place) -> Outcome:
    """Two ranks where they may share a GPU; examples/demo.py compares them with a process that has no ranks."""
    several = place.device != "cuda" or gpus().count > 1 or gpus().nccl >= NCCL_OF_SEVERAL_RANKS
    ranks = 2 if several else 1
    command = [
        sys.executable,
        "examples/demo.py",
        "--front",
        "cpp",
        "--mode",
        "fully_shard",
        "--ranks",
        ranks,
        "--short",
    ]
    more = shared_gpu() if place.device == "cuda" and gpus().count < ranks else {}
    problem = place.run([*command, "--out", place.folder / "demo"], **more)
    return place.outcome_of(problem, f"C++, {ranks} rank{'s' * (ranks > 1)} {over(place)}")


# Figures


def bench(suite: str) -> Callable[[Place], Outcome]:
    def run(place: Place) -> Outcome:
        command = [sys.executable, "benchmarks/run.py", "--quick", "--suites", suite, "--save"]
        problem = place.run([*command, "--results", place.folder])
        said = place.said()
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


_MEASURED = ("meters", "host_cost", "memory_steps", "rank_steps", "modelled_peers", "moves")


def _measures(suite: str) -> Step:
    run = needs_gpu(needs_file(BENCHMARKS / "rank_steps", "build_programs", bench(suite)))
    return Step(f"bench_{suite}", f"figures of the suite {suite}, in short", 180, run)


#: Those of a stage run beside each other; the next stage begins when all have ended. First what tells most in a minute.
STAGES: list[list[Step]] = [
    [Step("build_library", "the library and the Python package", BUILD_LIMIT,
          builds((), ("shardwise", "shardwise_python")))],
    [Step("build_has_cuda", "NCCL and our kernels are in the library", 10,
          needs_file(BUILD / "build.ninja", "build_library", cuda_support))],
    [Step("build_tests", "the test programs", BUILD_LIMIT, build_tests)],
    [Step("build_programs", "benchmarks and the example", BUILD_LIMIT,
          builds(("-DSHARDWISE_BUILD_BENCHMARKS=ON", "-DSHARDWISE_BUILD_EXAMPLES=ON"), (*_MEASURED, "gpt")))],
    [Step("nccl_one_rank", "one rank over NCCL trains as by hand, and as torch's engine does", 60,
          needs_gpu(nccl_one_rank)),
     Step("unit_tests", "what needs no ranks", 120,
          needs_file(CPP / "unit_tests", "build_tests", unit_tests))],
    [Step("nccl_several_ranks", "the same with ranks on all GPUs, or two on one", 90, needs_gpu(nccl_several_ranks))],
    [Step("direct_several_ranks", "the same over the direct transport", 90, needs_gpu(direct_several_ranks))],
    [*(Step(f"rank_tests_{n}", f"rank tests in C++, ranks are threads on one GPU: slice {n} of {RANK_SLICES}", 180,
            rank_tests(n)) for n in range(1, RANK_SLICES + 1))],
    [Step("graph_rows_cpp", "a step in a CUDA graph, in C++", 60,
          needs_gpu(needs_file(CPP / "rank_tests", "build_tests", graph_rows_cpp))),
     Step("graph_rows_python", "a step in a CUDA graph, in Python", 60, needs_gpu(graph_rows_python)),
     Step("python_on_device", "rows in Python, ranks are processes that share a GPU", 150,
          needs_gpu(python_on_device)),
     Step("nccl_cpp", "a C++ program over NCCL trains as one process does", 60,
          needs_gpu(needs_file(BUILD / "examples" / "cpp" / "gpt", "build_programs", nccl_cpp)))],
    [Step("moves", "our kernels compute as torch does, and how fast", 60,
          needs_gpu(needs_file(BENCHMARKS / "moves", "build_programs", moves)))],
    [Step("memcheck", "compute-sanitizer finds no wrong access", 60,
          sanitizer("memcheck", "FullyShardSizes.SmallAnd*")),
     Step("racecheck", "compute-sanitizer finds no race in our kernels", 60,
          sanitizer("racecheck", "ReplicateGradients.UnusedOnSomeRanks"))],
    [Step("profile", "a picture and a table of one step: copies, gaps, streams, the host's time", 60,
          needs_gpu(profile))],
    *([_measures(suite)] for suite in ("gpu", "steps", "memory", "host")),
    [Step("python_rows", "rows in Python", 480, needs_gpu(python_rows))],
]  # fmt: skip
STEPS = [step for stage in STAGES for step in stage]
