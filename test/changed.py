"""What `make test CHANGED=1` runs: what the files that differ from the last commit, or else its own, can break.

- A file of tests: its tests.
- A file of csrc or python/shardwise: the tests that noticed the mutants of that file (mutants.tsv), and where
  it has fewer than FEW of them, those of its folder; of csrc, unit_tests as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mutant import places_of, read_table
from programs import ROOT, git
from suites import Suite, catch2, googletest, pytest

FEW = 5
GTEST = re.compile(r"^(?:TYPED_)?TEST(?:_F|_P)?\((\w+), (\w+)\)", re.MULTILINE)


def changed_files() -> list[str]:
    differ = git("diff", "--name-only", "--diff-filter=d", "HEAD").split()
    differ += git("ls-files", "--others", "--exclude-standard").split()
    return differ or git("diff", "--name-only", "--diff-filter=d", "HEAD~1", "HEAD").split()


def noticed_by(path: str) -> set[str]:
    """The titles of the tests that noticed mutants of the file, or of its folder."""
    mutants = read_table()

    def of(start: str) -> set[str]:
        found = [mutant for mutant in mutants if mutant.file.startswith(start)]
        return {test.partition(" ")[0] for mutant in found for test in (mutant.cpp, mutant.python) if test}

    its_own = of(path)
    return its_own if len(its_own) >= FEW else of(f"{Path(path).parent.as_posix()}/")


def choose(paths: Iterable[str]) -> list[Suite]:
    noticed: set[str] = set()
    chosen: dict[str, set[str]] = {"rank_tests": set(), "late_tests": set(), "pytest": set()}
    whole: set[str] = set()
    for path in paths:
        if re.match(r"test/python/\w+/test_\w+\.py", path):
            chosen["pytest"].add(path)
        elif match := re.match(r"test/cpp/(ranks|late)/\w+_test\.cpp", path):
            tests = GTEST.findall((ROOT / path).read_text())
            chosen[f"{match[1].rstrip('s')}_tests"] |= {f"*{group}*.{name}*" for group, name in tests}
        elif match := re.match(r"test/cpp/(unit|programs)/", path):
            whole.add(f"{match[1].removesuffix('s')}_tests")
        elif path.startswith(("csrc/", "python/shardwise/")):
            noticed |= noticed_by(path)
            whole |= {"unit_tests"} if path.startswith("csrc/") else set()
    for title in noticed:
        if "::" in title or title.startswith("test_"):
            chosen["pytest"] |= set(places_of(title))
        elif re.fullmatch(r"[\w/]+\.[\w/]+", title):
            chosen["late_tests" if title.startswith("Late") else "rank_tests"].add(title)
    suites = [catch2(name, name, 10) for name in sorted(whole)]
    for name in ("rank_tests", "late_tests"):
        if chosen[name]:
            suites.append(googletest(name, name, 20, ":".join(sorted(chosen[name]))))
    if chosen["pytest"]:
        suites.append(pytest("python_changed", 20, *sorted(chosen["pytest"])))
    return suites
