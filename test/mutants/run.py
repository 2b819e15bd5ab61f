"""Builds each mutant of the library beside the checkout and says which test fails first.

usage: run.py [--from NAME] [--jobs N] [--healthy] [WORDS ...]

With words, only the mutants whose name has them. Ends with an error when the tests of a language do not notice a
mutant. The tests themselves are those of build/dev (`make test` builds them). It takes up to a minute a mutant, so it
is not part of the test command. The last lines are the table of docs/testing.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mutant import Mutant
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "build" / "mutants"
BUILD = SOURCE / "build" / "dev"
TESTS = ROOT / "build" / "dev" / "test" / "cpp"
# What notices most, the quickest first.
USUAL = (
    "ReplicateGradients.*:ReplicateContract.*",
    "FullyShardPrograms.*:FullyShard.*",
    "FullyShardContract.*:FullyShardAutograd.*:FullyShardChanges.*:FullyShardOrder.*:FullyShardParticipation.*",
)
USUAL_IN_PYTHON = ("test/python/ranks", "-k", "test_replicate")
ALL = "Replicate*:FullyShard*:Checkpoint*"
SECONDS = 40  # for a test; healthy ones take a few
TIME_LIMIT = 124  # how a program ends whose test takes longer


def run(*command: str | Path, limit: int = 1200, mutated: bool = False) -> tuple[int, str]:
    """Status and output. `mutated` programs load the mutated library in the place of their own."""
    environment = {**os.environ, "CCACHE_BASEDIR": str(SOURCE)}
    if mutated:
        environment |= {"LD_LIBRARY_PATH": str(BUILD / "csrc"), "SHARDWISE_TEST_TIME_LIMIT": str(SECONDS)}
        environment["PYTHONPATH"] = str(SOURCE / "python")
    try:
        result = subprocess.run(
            [str(part) for part in command], cwd=ROOT if mutated else SOURCE, env=environment,
            capture_output=True, text=True, errors="replace", check=False, timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return 124, (error.stdout or b"").decode(errors="replace")
    return result.returncode, result.stdout + result.stderr


def must(*command: str | Path) -> None:
    status, output = run(*command)
    if status != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{output[-4000:]}")


def copy_sources() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        target = SOURCE / name
        content = (ROOT / name).read_bytes()
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def build(jobs: int, target: str = "shardwise") -> None:
    must("cmake", "--build", BUILD, "--target", target, "-j", str(jobs))


def install_extension() -> None:
    """Puts the mutated extension module in the place of the link to the one that is built."""
    for built in (BUILD / "csrc" / "bindings").glob("_C.*.so"):
        place = SOURCE / "python" / "shardwise" / built.name
        place.unlink(missing_ok=True)
        shutil.copy(built, place)


def link_extension() -> None:
    for link in (SOURCE / "python" / "shardwise").glob("_C.*.so"):
        link.unlink()
    link_built_package()


def rank_tests(suites: str) -> str:
    status, output = run(TESTS / "rank_tests", f"--gtest_filter={suites}", "--gtest_fail_fast", mutated=True)
    failed = re.findall(r"\[  FAILED  \] (\w+\.\w+)", output)
    begun = re.findall(r"\[ RUN      \] (\w+\.\w+)", output)
    if status == 0 or failed:
        return failed[0] if failed else ""
    return f"{begun[-1] if begun else 'rank_tests'} ({'hangs' if status == TIME_LIMIT else 'ends the program'})"


def catch_tests(program: str) -> str:
    status, output = run(TESTS / program, "--abort", mutated=True)
    title = re.findall(r"^-{79}\n(.+)\n", output, re.MULTILINE)
    return "" if status == 0 else f"{program}: {title[0] if title else 'ends early'}"


def first_failure_in_cpp(suites: str) -> str:
    """Of the C++ tests, the quickest first. A crash or a time limit is a failure too."""
    done: list[str] = []
    for part in (suites, *USUAL):
        if part and (failed := rank_tests(f"{part}:-{':'.join(done)}")):
            return failed
        done += [part] if part else []
    return catch_tests("unit_tests") or rank_tests(f"{ALL}:-{':'.join(done)}") or catch_tests("program_tests")


def first_failure_in_python(*what: str) -> str:
    status, output = run(
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
        "-o", f"pythonpath={SOURCE / 'python'} test/python", *what, mutated=True,
    )  # fmt: skip
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?\.py::([\w:]+)", output, re.MULTILINE)
    if status not in (0, 1, TIME_LIMIT):
        sys.exit(f"pytest ended with {status}:\n{output[-4000:]}")
    return "" if status == 0 else failed[0] if failed else "pytest (ends early)"


def link_built_package() -> None:
    """What stands in the package and is built lies beside the copied sources too."""
    for built in (ROOT / "python" / "shardwise").iterdir():
        link = SOURCE / built.relative_to(ROOT)
        if not link.exists() and built.name != "__pycache__":
            link.symlink_to(built)


def try_mutant(mutant: Mutant, jobs: int) -> tuple[bool, str]:
    """Whether it was noticed, and its row of the table."""
    path = SOURCE / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        sys.exit(f"{mutant.name}: its place is not once in {mutant.file}; mend test/mutants.")
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        found = {}
        if mutant.is_in_extension:
            build(jobs, "shardwise_python")
            install_extension()
        if mutant.is_in_package or mutant.is_in_extension:
            found["Python"] = first_failure_in_python(*(f"test/python/{file}" for file in mutant.suites.split()))
        else:
            build(jobs)
            found["C++"] = first_failure_in_cpp(mutant.suites)
            if "Python" in mutant.languages:
                found["Python"] = first_failure_in_python(*USUAL_IN_PYTHON)
    finally:
        path.write_text(original)
        if mutant.is_in_extension:
            link_extension()
    names = {language: f"`{name}`" if name else "**not noticed**" for language, name in found.items()}
    return all(found.values()), f"| {mutant.name} | {names.get('C++', '')} | {names.get('Python', '')} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="start", help="leave out those before the one of this name")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--healthy", action="store_true", help="first see that all tests pass without a mutant")
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    names = [mutant.name for mutant in MUTANTS]
    start = names.index(arguments.start) if arguments.start else 0
    chosen = [mutant for mutant in MUTANTS[start:] if " ".join(arguments.words) in mutant.name]
    if shutil.which("ninja") is None or shutil.which("cmake") is None or not (TESTS / "rank_tests").exists():
        sys.exit("The mutants need cmake and ninja on the PATH, and the tests of build/dev: run `make test` first.")
    SOURCE.mkdir(parents=True, exist_ok=True)
    copy_sources()
    link_built_package()
    if not all(mutant.is_in_package for mutant in chosen):
        must("cmake", "-S", SOURCE, "-B", BUILD, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
             "-DSHARDWISE_BUILD_PYTHON=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O1")  # fmt: skip
        build(arguments.jobs)
    if arguments.healthy and (failed := first_failure_in_cpp("") or first_failure_in_python(*USUAL_IN_PYTHON)):
        sys.exit(f"Without any mutant this fails: {failed}")
    rows = []
    for mutant in chosen:
        began = time.monotonic()
        rows.append(try_mutant(mutant, arguments.jobs))
        print(f"{rows[-1][1]}  {time.monotonic() - began:.0f} s", flush=True)
    noticed = sum(seen for seen, _ in rows)
    print(f"\n{noticed} of {len(rows)} mutants were noticed in all their languages\n")
    print("| broken on purpose | first C++ test that fails | first Python test |\n|---|---|---|")
    print("\n".join(row for _, row in rows))
    sys.exit(0 if noticed == len(rows) else 1)


if __name__ == "__main__":
    main()
