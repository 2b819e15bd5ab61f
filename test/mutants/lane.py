"""A copy of the sources that is broken in one place at a time, built, and shown to the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
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
HOW = re.compile(r" \((?:hangs|ends the program|ends early)\)$")


@dataclass(frozen=True)
class Noticed:
    """The test of each language that failed first: empty where none did, None where the language was not asked."""

    cpp: str | None = None
    python: str | None = None

    @property
    def everywhere(self) -> bool:
        return "" not in (self.cpp, self.python)


@dataclass(frozen=True)
class Lane:
    """One of several folders, so that several mutants are tried at a time."""

    source: Path

    @property
    def build_folder(self) -> Path:
        return self.source / "build" / "dev"

    def prepare(self, needs_build: bool) -> None:
        """The sources as they are in the checkout, and the library built from them."""
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in names.splitlines():
            target = self.source / name
            if not (ROOT / name).exists():
                continue
            content = (ROOT / name).read_bytes()
            if not target.exists() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        self._link_built_package()
        if needs_build:
            self._must("cmake", "-S", self.source, "-B", self.build_folder, "-G", "Ninja",
                       f"-DPython_EXECUTABLE={sys.executable}", "-DSHARDWISE_BUILD_PYTHON=ON",
                       "-DCMAKE_CXX_FLAGS_RELEASE=-O0")  # fmt: skip
            self.build("shardwise")

    def build(self, target: str) -> None:
        self._must("cmake", "--build", self.build_folder, "--target", target, "-j", "1")

    def try_mutant(self, mutant: Mutant, known: Noticed) -> Noticed:
        """Asks the tests that are known to notice it, then the others, until one fails in each of its languages."""
        path = self.source / mutant.file
        original = path.read_text()
        if original.count(mutant.old) != 1:
            sys.exit(f"{mutant.name}: its place is not once in {mutant.file}; mend test/mutants.")
        path.write_text(original.replace(mutant.old, mutant.new))
        try:
            if mutant.is_in_extension:
                self.build("shardwise_python")
                self._install_extension()
            if mutant.is_in_package or mutant.is_in_extension:
                files = [f"test/python/{file}" for file in mutant.suites.split()]
                return Noticed(python=self.first_failure_in_python(known.python, *files))
            self.build("shardwise")
            if mutant.device != "cpu":
                return Noticed(self._rank_tests(mutant.suites, SHARDWISE_TEST_DEVICE=mutant.device))
            cpp = self.first_failure_in_cpp(known.cpp, mutant.suites)
            if "Python" not in mutant.languages:
                return Noticed(cpp)
            return Noticed(cpp, self.first_failure_in_python(known.python, *USUAL_IN_PYTHON))
        finally:
            path.write_text(original)
            if mutant.is_in_extension:
                self._link_extension()

    def first_failure_in_cpp(self, known: str | None = None, suites: str = "") -> str:
        """A crash or a time limit is a failure too."""
        done: list[str] = []
        first = HOW.sub("", known or "")
        if first.startswith(("unit_tests", "program_tests")) and (failed := self._catch_tests(first.split(":")[0])):
            return failed
        for part in (f"{first}:{first}/*" if re.fullmatch(r"\w+\.\w+", first) else "", suites, *USUAL):
            if part and (failed := self._rank_tests(f"{part}:-{':'.join(done)}")):
                return failed
            done += [part] if part else []
        return (
            self._catch_tests("unit_tests")
            or self._rank_tests(f"{ALL}:-{':'.join(done)}")
            or self._catch_tests("program_tests")
        )

    def first_failure_in_python(self, known: str | None, *what: str) -> str:
        # Without the values of its parameters, which are no part of an expression.
        if name := HOW.sub("", known or "").rpartition("::")[2].partition("[")[0]:
            files = what[:1] if what == USUAL_IN_PYTHON else what
            failed = self._pytest(*files, "-k", name)
            if failed:
                return failed
        return self._pytest(*what)

    def _rank_tests(self, suites: str, **variables: str) -> str:
        program = "late_tests" if suites.startswith("Late") else "rank_tests"
        command = (TESTS / program, f"--gtest_filter={suites}", "--gtest_fail_fast")
        status, output = self._run(*command, mutated=True, variables=variables)
        failed = re.findall(r"\[  FAILED  \] (\w+\.\w+)", output)
        begun = re.findall(r"\[ RUN      \] (\w+\.\w+)", output)
        if status == 0 or failed:
            return failed[0] if failed else ""
        return f"{begun[-1] if begun else 'rank_tests'} ({'hangs' if status == TIME_LIMIT else 'ends the program'})"

    def _catch_tests(self, program: str) -> str:
        status, output = self._run(TESTS / program, "--abort", mutated=True)
        title = re.findall(r"^-{79}\n(.+)\n", output, re.MULTILINE)
        return "" if status == 0 else f"{program}: {title[0] if title else 'ends early'}"

    def _pytest(self, *what: str) -> str:
        status, output = self._run(
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
            "-o", f"pythonpath={self.source / 'python'} test/python test/python/ranks test/python/interop",
            *what, mutated=True,
        )  # fmt: skip
        failed = re.findall(r"^(?:FAILED|ERROR) \S+?\.py::([\w:]+)", output, re.MULTILINE)
        if status not in (0, 1, 5, TIME_LIMIT):
            sys.exit(f"pytest ended with {status}:\n{output[-4000:]}")
        return "" if status in (0, 5) else failed[0] if failed else "pytest (ends early)"

    def _run(
        self, *command: str | Path, limit: int = 1200, mutated: bool = False, variables: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Status and output. `mutated` programs load the mutated library in the place of their own."""
        environment = {**os.environ, "CCACHE_BASEDIR": str(self.source), **(variables or {})}
        if mutated:
            environment |= {"LD_LIBRARY_PATH": str(self.build_folder / "csrc")}
            environment |= {"SHARDWISE_TEST_TIME_LIMIT": str(SECONDS), "PYTHONPATH": str(self.source / "python")}
        try:
            result = subprocess.run(
                [str(part) for part in command], cwd=ROOT if mutated else self.source, env=environment,
                capture_output=True, text=True, errors="replace", check=False, timeout=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return TIME_LIMIT, (error.stdout or b"").decode(errors="replace")
        return result.returncode, result.stdout + result.stderr

    def _must(self, *command: str | Path) -> None:
        status, output = self._run(*command)
        if status != 0:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{output[-4000:]}")

    def _install_extension(self) -> None:
        """Puts the mutated extension module in the place of the link to the one that is built."""
        for built in (self.build_folder / "csrc" / "bindings").glob("_C.*.so"):
            place = self.source / "python" / "shardwise" / built.name
            place.unlink(missing_ok=True)
            shutil.copy(built, place)

    def _link_extension(self) -> None:
        for link in (self.source / "python" / "shardwise").glob("_C.*.so"):
            link.unlink()
        self._link_built_package()

    def _link_built_package(self) -> None:
        """What stands in the package and is built lies beside the copied sources too."""
        for built in (ROOT / "python" / "shardwise").iterdir():
            link = self.source / built.relative_to(ROOT)
            if not link.exists() and built.name != "__pycache__":
                link.symlink_to(built)
