"""Builds each mutant in a copy of the checkout and says which tests failed: `python test/mutants/run.py [words]`.

With words, only the mutants whose name has them. Ends with an error when the tests of a language do not notice a
mutant. It takes about a minute a mutant, so it is not part of the test command.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "build" / "mutants"
# As in the checkout itself, so that ccache knows the files.
BUILD = SOURCE / "build" / "dev"


def run(*command: str | Path, environment: dict[str, str] | None = None) -> tuple[int, str]:
    result = subprocess.run(
        [str(part) for part in command], cwd=SOURCE,
        env={**os.environ, "CCACHE_BASEDIR": str(SOURCE), **(environment or {})},
        capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
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


def build() -> None:
    must("cmake", "--build", BUILD)
    must("cmake", "--install", BUILD, "--component", "shardwise", "--prefix", SOURCE / "python" / "shardwise")


def failures(languages: tuple[str, ...] = ("C++", "Python")) -> dict[str, list[str]]:
    """The tests of each of the languages that fail now. A crash or a time limit counts, under the name of the suite."""
    status, output = run(
        BUILD / "test/cpp/rank_tests",
        "--gtest_filter=Replicate*:FullyShard*",
        environment={"SHARDWISE_TEST_TIME_LIMIT": "60"},
    )
    cpp = sorted(set(re.findall(r"\[  FAILED  \] (\w+\.\w+)", output)))
    if status != 0 and not cpp:
        cpp = ["rank_tests ended early"]
    if "Python" not in languages:
        return {"C++": cpp}
    status_py, output_py = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test/python/ranks", "-k", "test_replicate"
    )
    python = sorted(set(re.findall(r"^FAILED \S+::(\w+::\w+)", output_py, re.MULTILINE)))
    if status_py != 0 and not python:
        python = ["pytest ended early"]
    return {"C++": cpp, "Python": python}


def try_mutant(mutant: Mutant) -> bool:
    path = SOURCE / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        sys.exit(f"{mutant.name}: its place is not once in {mutant.file}; mend test/mutants/mutants.py.")
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        build()
        found = failures(mutant.languages)
    finally:
        path.write_text(original)
    print(f"{mutant.name} ({mutant.file})")
    for language, names in found.items():
        print(f"  {language}: {', '.join(names) or 'NOT NOTICED'}", flush=True)
    return all(found.values())


def main() -> None:
    words = " ".join(sys.argv[1:])
    chosen = [mutant for mutant in MUTANTS if words in mutant.name]
    if shutil.which("ninja") is None or shutil.which("cmake") is None:
        sys.exit("The mutants need cmake and ninja on the PATH.")
    SOURCE.mkdir(parents=True, exist_ok=True)
    copy_sources()
    must("cmake", "-S", SOURCE, "-B", BUILD, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
         "-DSHARDWISE_BUILD_TESTS=ON", "-DSHARDWISE_RANK_TESTS=[fr]*")  # fmt: skip
    build()
    healthy = failures()
    if any(healthy.values()):
        sys.exit(f"Tests fail without any mutant: {healthy}")
    noticed = [try_mutant(mutant) for mutant in chosen]
    print(f"{sum(noticed)} of {len(noticed)} mutants were noticed in all their languages")
    sys.exit(0 if all(noticed) else 1)


if __name__ == "__main__":
    main()
