"""The steps of on_gpu.py: what each runs, and what it says of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from gpu_kit import KIT
from programs import ROOT, run_program
from reports import FAILED, PASSED, Result, counts, read_googletest, read_junit
from suites import late_filter

sys.path += [str(ROOT / "scripts"), str(ROOT / "benchmarks")]
from gpu import ALLOWS_SEVERAL_RANKS, NCCL_OF_SEVERAL_RANKS, Gpus
from prepare import missing_test_headers

MISSING = "missing"
#: Seconds that a build may take.
BUILD_LIMIT = 480
BUILD = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")
CPP = BUILD / "test" / "cpp"
RANKS = CPP / "rank_tests"
BENCHMARKS = BUILD / "benchmarks" / "cpp"
#: An NCCL that several ranks may share a GPU with, where a kit brought one.
NCCL = BUILD / "libnccl.so.2"
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

    def environment(self, **more: str) -> dict[str, str]:
        return {"SHARDWISE_TEST_TIME_LIMIT": "60", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **more}

    def run(self, command: Sequence[object], **more: str) -> str:
        """How the program failed; empty if it did not."""
        words = [str(word) for word in command]
        return run_program(words, self.log, self.limit, ROOT, self.environment(**more))[0]

    def outcome_of(self, problem: str, good: str) -> Outcome:
        """With the first error that the log names, if it failed."""
        if not problem:
            return Outcome(PASSED, good)
        error = re.search(r"\w*(?:Error|error): .*", self.said())
        return Outcome(FAILED, f"{problem}: {error[0]}" if error else problem)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@cache
def gpus() -> Gpus:
    return Gpus.found({**os.environ, **shared_gpu()})


@dataclass(frozen=True)
class Step:
    """`limit`: seconds that it may take; `file`: what it cannot run without, and `made_by`: the step that makes it."""

    name: str
    about: str
    limit: int
    act: Callable[[Place], Outcome]
    #: Whether it needs one where none stands in for it.
    needs_gpu: bool = False
    file: Path | None = None
    made_by: str = ""

    def run(self, place: Place) -> Outcome:
        if self.needs_gpu and place.device == "cuda" and gpus().count == 0:
            return Outcome(MISSING, "torch finds no GPU here")
        if self.file and not self.file.exists():
            return Outcome(MISSING, f"there is no {self.file.relative_to(ROOT)}: the step {self.made_by} makes it")
        return self.act(place)


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


def build(options: Sequence[str], targets: Sequence[str], place: Place) -> Outcome:
    if BUILD == KIT:
        return Outcome(PASSED, "the kit has it")
    command = [sys.executable, ROOT / "scripts" / "build.py", BUILD.name, *options]
    problem = place.run([*command, "--target", *targets, "--install"])
    if "it was ended after" in problem:
        problem += ": run it again, it goes on where it was"
    return place.outcome_of(problem, " ".join(targets))


def cuda_support(_place: Place) -> Outcome:
    """What is for GPUs is left out of a build where something is not there for it."""
    built, cache = (BUILD / "build.ninja").read_text(), BUILD / "CMakeCache.txt"
    lacking = [what for what, sign in (("NCCL", "USE_C10D_NCCL"), ("our kernels", "kernels.cu.o")) if sign not in built]
    if lacking:
        # A kit has no cache.
        why = re.search("^SHARDWISE_WITHOUT_KERNELS:INTERNAL=(.+)", cache.read_text() if cache.exists() else "", re.M)
        reason = why[1] if why else "the build said why"
        return Outcome(MISSING, f"{' and '.join(lacking)} left out: {reason}; torch's own kernels move the pieces")
    return Outcome(PASSED, "NCCL and our kernels are in the library")


def build_tests(place: Place) -> Outcome:
    wanted = [header for header in missing_test_headers() if "valgrind" not in header]
    if wanted:
        return Outcome(MISSING, f"{' and '.join(wanted)}: {TEST_DEPS}")
    deps = os.environ.get("SHARDWISE_TEST_DEPS", "")
    options = ("-DSHARDWISE_BUILD_TESTS=ON", f"-DSHARDWISE_TEST_DEPS={deps}")
    programs = ("unit_tests", "rank_tests", "late_tests", "bound_models", "bound_late")
    return build(options, programs, place)


# Tests


def unit_tests(place: Place) -> Outcome:
    report = place.folder / "unit_tests.xml"
    report.unlink(missing_ok=True)
    ended = place.run([CPP / "unit_tests", "-r", "junit", "-o", report])
    return outcome_of(read_junit("unit_tests", report), ended)


#: Of rank_tests, those that steps of their own run, and what torch computes on CPUs alone: a LayerNorm whose weights
#: have another dtype than its input.
NOT_ON_GPUS = "FullyShardCudaGraph*:ParameterDtypes.SomeAreKept"


def tests_of(program: Path, chosen: str, environment: Mapping[str, str]) -> list[str]:
    """The names of the tests that a filter of GoogleTest's chooses."""
    command = [str(program), "--gtest_list_tests", f"--gtest_filter={chosen}"]
    listed = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=True).stdout
    names, group = [], ""
    for line in listed.splitlines():
        name = line.split("#")[0].rstrip()
        if line.startswith("  "):
            names.append(group + name.strip())
        elif name.endswith("."):
            group = name
    return [name for name in names if "DISABLED_" not in name]


def run_tests(
    suite: str, program: Path, tests: Sequence[str], log: Path, until: float, environment: Mapping[str, str]
) -> list[Result]:
    """Runs them until that time of time.monotonic(), and goes on after one that ends the program. Those that were not
    reached have failed, and say so."""
    results: list[Result] = []
    left, reason = list(tests), "the time was up before it began"
    while left and time.monotonic() < until:
        before = len(log.read_text(errors="replace")) if log.exists() else 0
        command = [str(program), f"--gtest_filter={':'.join(left)}"]
        ended, _ = run_program(command, log, max(until - time.monotonic(), 1), program.parent, dict(environment))
        found = read_googletest(suite, log.read_text(errors="replace")[before:])
        results += found
        left = [name for name in left if name not in {result.name for result in found}]
        if not found:
            reason = f"{ended or 'the program ended'} before a test began"
            break
    return [*results, *(Result(suite, "", name, FAILED, reason) for name in left)]


def gtests(place: Place, tests: Sequence[str], **more: str) -> Outcome:
    until = time.monotonic() + place.limit - 2
    return outcome_of(run_tests(place.step, RANKS, tests, place.log, until, place.environment(**more)))


def rank_tests(number: int, place: Place) -> Outcome:
    """A slice of them. Neighbours, which take about as long, go apart."""
    device = {"SHARDWISE_TEST_DEVICE": "cuda" if place.device == "cuda" else "late_shared"}
    listed = tests_of(RANKS, f"{late_filter(place.only)}:{NOT_ON_GPUS}", place.environment(**device))
    tests = listed[number - 1 :: RANK_SLICES]
    if not tests:
        return Outcome(PASSED, "no test is in this slice of the filter")
    # A test of theirs is of processes over NCCL.
    return gtests(place, tests, **device, **shared_gpu())


def pytest(place: Place, what: str = "test/python/ranks", **more: str) -> Outcome:
    report = place.folder / f"{place.step}.xml"
    report.unlink(missing_ok=True)
    options = [
        "-v",
        "-p",
        "no:cacheprovider",
        "-o",
        f"faulthandler_timeout={place.limit / 2:g}",
        f"--junitxml={report}",
    ]
    ended = place.run([sys.executable, "-m", "pytest", *options, what], **more)
    if "No module named pytest" in place.said():
        return Outcome(MISSING, "pytest is not installed")
    return outcome_of(read_junit(place.step, report), ended)


def graph_rows_cpp(place: Place) -> Outcome:
    tests = tests_of(RANKS, "FullyShardCudaGraph*", place.environment())
    if not tests:
        return Outcome(MISSING, "this build has no CUDA kernels, so the test is not in it")
    return gtests(place, tests)


#: That our kernels are to have on a GPU, of a copy's of torch.
LEAST_SPEED = 0.8


def moves(place: Place) -> Outcome:
    """What moves pieces, beside torch's operations, and beside a copy of torch's."""
    words = ["--device", "cuda", "--large", 1] if place.device == "cuda" else ["--megabytes", 20]
    problem = place.run([BENCHMARKS / "moves", *words])
    least = min(map(float, re.findall(r"GB/s +([\d.]+) of a copy", place.said())), default=0.0)
    if not problem and least < LEAST_SPEED and place.device == "cuda":
        problem = f"{least} of a copy's speed at the least; it is to be {LEAST_SPEED}"
    return place.outcome_of(problem, f"as torch computes; {least} of a copy's speed and more")


def sanitizer(tool: str, tests: str, place: Place) -> Outcome:
    if place.device != "cuda":
        return Outcome(MISSING, "compute-sanitizer needs a GPU")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", 9, RANKS, f"--gtest_filter={tests}"]
    problem = place.run(command, SHARDWISE_TEST_DEVICE="cuda")
    if "could not be started" in problem:
        return Outcome(MISSING, "there is no compute-sanitizer")
    return place.outcome_of(problem, tests)


# NCCL


def torchrun(ranks: int, *words: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words]


def shared_gpu() -> dict[str, str]:
    """So that several ranks may share a GPU, where NCCL can do that: few blocks each, for all must fit at once."""
    preloaded = {"LD_PRELOAD": str(NCCL)} if NCCL.exists() else {}
    return {ALLOWS_SEVERAL_RANKS: "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", **preloaded}


def trains_beside_others(place: Place, ranks: int, over: str, *words: str, **more: str) -> Outcome:
    device = "cuda" if place.device == "cuda" else "cpu"
    problem = place.run(torchrun(ranks, ROOT / "test" / "nccl_ranks.py", "--device", device, *words), **more)
    return place.outcome_of(problem, f"Python, {ranks} ranks {over}, {place.said().count('the same: ')} ways")


def over(place: Place) -> str:
    return "over NCCL" if place.device == "cuda" else "on the CPU, over shardwise's transport"


def several_ranks(place: Place, act: Callable[[int, dict[str, str]], Outcome]) -> Outcome:
    """Of as many as there are GPUs, or two on one, with the environment that this needs."""
    found = gpus()
    if place.device == "cuda" and found.count < 2 and found.nccl < NCCL_OF_SEVERAL_RANKS:
        version = ".".join(map(str, found.nccl))
        return Outcome(MISSING, f"there is one GPU, and NCCL {version} takes one rank on each (2.30 would take more)")
    ranks = max(2, found.count)
    return act(ranks, shared_gpu() if place.device == "cuda" and found.count < ranks else {})


def nccl_several_ranks(place: Place) -> Outcome:
    return several_ranks(place, lambda ranks, more: trains_beside_others(place, ranks, over(place), **more))


def graph_rows_python(place: Place, several: bool) -> Outcome:
    """A single rank has no collectives in its graph."""
    row = "test/python/ranks/test_training_cuda_graph.py"
    return several_ranks(place, lambda _, more: pytest(place, row, **more)) if several else pytest(place, row)


def nccl_cpp(place: Place) -> Outcome:
    """Two ranks where they may share a GPU; examples/demo.py compares them with a process that has no ranks."""
    several = place.device != "cuda" or gpus().count > 1 or gpus().nccl >= NCCL_OF_SEVERAL_RANKS
    ranks = 2 if several else 1
    demo = [sys.executable, "examples/demo.py", "--front", "cpp", "--mode", "fully_shard", "--short"]
    more = shared_gpu() if place.device == "cuda" and gpus().count < ranks else {}
    problem = place.run([*demo, "--ranks", ranks, "--out", place.folder / "demo"], **more)
    return place.outcome_of(problem, f"C++, {ranks} rank{'s' * (ranks > 1)} {over(place)}")


# Figures


def bench(suite: str, place: Place) -> Outcome:
    command = [sys.executable, "benchmarks/run.py", "--quick", "--suites", suite, "--save"]
    problem = place.run([*command, "--results", place.folder])
    number = (re.findall(r"^(\d+) figures in", place.said(), re.MULTILINE) or ["0"])[0]
    nothing = re.findall(r"^.*nothing was measured: (.*)$", place.said(), re.MULTILINE)
    if not problem and number == "0":
        if nothing:
            return Outcome(MISSING, nothing[0])
        problem = "nothing was measured"
    return place.outcome_of(problem, f"{number} figures")


def profile(place: Place) -> Outcome:
    """On the CPU of a small model: it stands in for a device that torch's profiler knows."""
    words: list[object] = ["--device", "cuda"]
    if place.device != "cuda":
        words = ["--device", "cpu", "--layers", 2, "--width", 64, "--heads", 2, "--batch", 1, "--length", 32]
    out = place.folder / "profile"
    problem = place.run([sys.executable, "benchmarks/python/profile_step.py", "--out", out, *words])
    return place.outcome_of(problem, f"{out}/step.svg, step.md")


_MEASURED = ("meters", "host_cost", "memory_steps", "rank_steps", "modelled_peers", "moves")


_LIBRARY = ("shardwise", "shardwise_python")
_WITH_PROGRAMS = ("-DSHARDWISE_BUILD_BENCHMARKS=ON", "-DSHARDWISE_BUILD_EXAMPLES=ON")
_PROGRAMS = "build_programs"
_TESTS = "build_tests"

#: Those of a stage run beside each other; the next stage begins when all have ended. First what tells most in a minute.
STAGES: list[list[Step]] = [
    [Step("build_library", "the library and the Python package", BUILD_LIMIT, partial(build, (), _LIBRARY))],
    [Step("build_has_cuda", "NCCL and our kernels are in the library", 10, cuda_support, False,
          BUILD / "build.ninja", "build_library")],
    [Step(_TESTS, "the test programs", BUILD_LIMIT, build_tests)],
    [Step(_PROGRAMS, "benchmarks and the example", BUILD_LIMIT, partial(build, _WITH_PROGRAMS, (*_MEASURED, "gpt")))],
    [Step("nccl_one_rank", "one rank over NCCL trains as by hand, and as torch's engine does", 60,
          lambda place: trains_beside_others(place, 1, over(place)), True),
     Step("unit_tests", "what needs no ranks", 120, unit_tests, False, CPP / "unit_tests", _TESTS)],
    [Step("nccl_several_ranks", "the same with ranks on all GPUs, or two on one", 90, nccl_several_ranks, True)],
    [Step("direct_several_ranks", "the same over the direct transport", 90,
          lambda place: trains_beside_others(place, 2, "over the direct transport", "--direct"), True)],
    [*(Step(f"rank_tests_{n}", f"rank tests in C++, ranks are threads on one GPU: slice {n} of {RANK_SLICES}", 180,
            partial(rank_tests, n), True, RANKS, _TESTS) for n in range(1, RANK_SLICES + 1))],
    [Step("graph_rows_cpp", "a step in a CUDA graph, in C++", 60, graph_rows_cpp, True, RANKS, _TESTS),
     Step("graph_rows_python", "a step in a CUDA graph, in Python", 60,
          partial(graph_rows_python, several=False), True),
     Step("graph_rows_several", "the same with collectives over NCCL, of two ranks on one GPU", 60,
          partial(graph_rows_python, several=True), True),
     # Those whose models follow the device, over the direct transport.
     Step("python_on_device", "rows in Python, ranks are processes that share a GPU", 150,
          lambda place: pytest(place, SHARDWISE_TEST_DEVICE=place.device), True),
     Step("nccl_cpp", "a C++ program over NCCL trains as one process does", 60, nccl_cpp, True,
          BUILD / "examples" / "cpp" / "gpt", _PROGRAMS)],
    [Step("moves", "our kernels compute as torch does, and how fast", 60, moves, True,
          BENCHMARKS / "moves", _PROGRAMS)],
    [Step("memcheck", "compute-sanitizer finds no wrong access", 60,
          partial(sanitizer, "memcheck", "FullyShardSizes.SmallAnd*"), True, RANKS, _TESTS),
     Step("racecheck", "compute-sanitizer finds no race in our kernels", 60,
          partial(sanitizer, "racecheck", "ReplicateGradients.UnusedOnSomeRanks"), True, RANKS, _TESTS)],
    [Step("profile", "a picture and a table of one step: copies, gaps, streams, the host's time", 60, profile, True)],
    *([Step(f"bench_{suite}", f"figures of the suite {suite}, in short", 180, partial(bench, suite), True,
            BENCHMARKS / "rank_steps", _PROGRAMS)] for suite in ("gpu", "steps", "memory", "host")),
    # Their ranks are processes on the CPU; tests that need a GPU run where there is one.
    [Step("python_rows", "rows in Python", 480, lambda place: pytest(place, SHARDWISE_TEST_ROWS="1"), True)],
]  # fmt: skip
