"""A copy of the sources that is broken in one place at a time, built, and shown to the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mutant import NOT_NOTICED, Mutant, places_of, sources
from programs import ROOT, copy_sources
from suites import PROGRAMS

# What notices nearly all of them.
MOST = "Replicate*:FullyShard*:Checkpoint*"
SECONDS = 40  # for a test; healthy ones take a few
TIME_LIMIT = 124  # how a program ends whose test takes longer
HOW = re.compile(r" \((?:hangs|ends the program|ends early|late|, )+\)$")


@dataclass(frozen=True)
class Lane:
    """One of several folders, so that several mutants are tried at a time."""

    source: Path

    @property
    def build_folder(self) -> Path:
        return self.source / "build" / "dev"

    def prepare(self, needs_build: bool) -> None:
        """The sources as they are in the checkout, and the library built from them."""
        copy_sources(self.source)
        self._link_built_package()
        if needs_build:
            self._must("cmake", "-S", self.source, "-B", self.build_folder, "-G", "Ninja",
                       f"-DPython_EXECUTABLE={sys.executable}", "-DSHARDWISE_BUILD_PYTHON=ON",
                       "-DCMAKE_CXX_FLAGS_RELEASE=-O0")  # fmt: skip
            self.build("shardwise")

    def build(self, target: str) -> None:
        self._must("cmake", "--build", self.build_folder, "--target", target, "-j", "1")

    def try_mutant(self, mutant: Mutant) -> Mutant:
        """The mutant with the tests that fail first in each of its languages."""
        path = self.source / mutant.file
        path.write_text(mutant.changed())
        try:
            if mutant.is_in_extension:
                self.build("shardwise_python")
                self._install_extension()
            elif not mutant.is_in_package:
                self.build("shardwise")
            return replace(
                mutant,
                cpp=mutant.cpp and next(filter(None, self._fail_in_cpp(mutant)), NOT_NOTICED),
                python=mutant.python and next(filter(None, self._fail_in_python(mutant)), NOT_NOTICED),
            )
        finally:
            path.write_text(sources()[mutant.file])
            if mutant.is_in_extension:
                self._link_extension()

    def _fail_in_cpp(self, mutant: Mutant) -> Iterator[str]:
        """Of more and more tests, what failed first: those that are known to notice it, and their neighbours."""
        known, done = HOW.sub("", mutant.cpp), []
        if known.startswith(("unit_tests", "program_tests")):
            yield self._catch_tests(known.split(":")[0])
        named = re.fullmatch(r"(\w+)\.\w+", known)
        for part in (f"{known}:{known}/*", f"{named[1]}.*") if named else ():
            yield self._rank_tests(f"{part}:-{':'.join(done)}", mutant.is_late)
            done.append(part)
        if mutant.is_late:
            return
        yield self._catch_tests("unit_tests")
        yield self._rank_tests(f"{MOST}:-{':'.join(done)}")
        yield self._catch_tests("program_tests")

    def _fail_in_python(self, mutant: Mutant) -> Iterator[str]:
        known = places_of(HOW.sub("", mutant.python))
        for what in (known, [place.partition("::")[0] for place in known]):
            yield self._pytest(*what) if what else ""
        if mutant.cpp:
            yield self._pytest("test/python/ranks", "-k", "Replicate")
        else:
            yield self._pytest(*(f"test/python/{folder}" for folder in ("unit", "ranks", "interop")))

    def _rank_tests(self, suites: str, is_late: bool = False) -> str:
        """A crash or a time limit is a failure too."""
        program = "late_tests" if suites.startswith("Late") else "rank_tests"
        command = (PROGRAMS / program, f"--gtest_filter={suites}", "--gtest_fail_fast")
        variables = {"SHARDWISE_TEST_DEVICE": "late"} if is_late else {}
        status, output = self._run(*command, mutated=True, variables=variables)
        failed = re.findall(r"\[  FAILED  \] (\w+\.\w+)", output)
        begun = re.findall(r"\[ RUN      \] (\w+\.\w+)", output)
        if status == 0:
            return ""
        how = [] if failed else ["hangs" if status == TIME_LIMIT else "ends the program"]
        how += ["late"] if is_late and program == "rank_tests" else []
        name = (failed or begun[-1:] or [program])[0]
        return f"{name} ({', '.join(how)})" if how else name

    def _catch_tests(self, program: str) -> str:
        status, output = self._run(PROGRAMS / program, "--abort", mutated=True)
        title = re.findall(r"^-{79}\n(.+)\n", output, re.MULTILINE)
        return "" if status == 0 else f"{program}: {title[0] if title else 'ends early'}"

    def _pytest(self, *what: str) -> str:
        status, output = self._run(
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
            "-o", f"pythonpath={self.source / 'python'} test scripts test/python test/python/ranks test/python/interop",
            *what, mutated=True,
        )  # fmt: skip
        failed = re.findall(r"^(?:FAILED|ERROR) \S+?\.py::([\w:]+)", output, re.MULTILINE)
        if status not in (0, 1, 5, TIME_LIMIT):
            sys.exit(f"pytest ended with {status}:\n{output[-4000:]}")
        return "" if status in (0, 5) else failed[0] if failed else "pytest (ends early)"

    def _run(
        self, *command: str | Path, limit: int = 1200, mutated: bool = False, variables: Mapping[str, str] | None = None
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
