"""Compares rows.tsv with the tests that really ran, in C++ and in Python.

The row train_parity_single_group of the class Replicate1DTrainingCore is, in any file,
  C++     Replicate1DTrainingCore.TrainParitySingleGroup
  Python  TestReplicate1DTrainingCore::test_train_parity_single_group
In C++ each word of the row begins with a capital and nothing else changes: 1f1b_microbatching is 1f1bMicrobatching.
Parameters do not count: Anything/Class.Row/0, Class/0.Row and test_row[x] are the row too; one that ran is enough, and
a test that was skipped did not run.

A row that one side lacks is a problem unless row_exceptions.tsv names it, with a reason. So is an exception whose row
ran, or that names no row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import tables
from reports import SKIPPED, Result

HERE = Path(__file__).resolve().parent
LANGUAGES = {"cpp": "C++", "py": "Python"}


@dataclass(frozen=True, order=True)
class Wanted:
    """A row on one side."""

    group: str
    row: str
    language: str

    @property
    def name(self) -> tuple[str, str]:
        """Class and name of its test."""
        in_cpp = self.language == "cpp"
        return (self.group, cpp_name(self.row)) if in_cpp else (f"Test{self.group}", f"test_{self.row}")

    @property
    def title(self) -> str:
        return ("." if self.language == "cpp" else "::").join(self.name)


def cpp_name(row: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in row.split("_"))


def read_rows(path: Path) -> list[Wanted]:
    """Of rows.tsv, or of row_exceptions.tsv, where each line gives its reason."""
    found = []
    for line in tables.read(path):
        if not line.get("reason", "none is needed").strip():
            raise ValueError(f"{path.name}: {line['row']}: an exception needs a reason")
        found += [Wanted(line["class"], line["row"], language) for language in line["languages"].split(",")]
    for one, count in Counter(found).items():
        if one.language not in LANGUAGES:
            raise ValueError(f"{path.name}: {one.row}: a language is cpp or py, not {one.language!r}")
        if count > 1:
            raise ValueError(f"{path.name}: {one.group} {one.row} stands there more than once for {one.language}")
    return found


def names_run(results: Iterable[Result], language: str) -> set[tuple[str, str]]:
    """Class and name of the tests that ran, without their parameters, as rows would name them."""
    names = set()
    for result in results:
        if result.outcome == SKIPPED:
            continue
        if language == "cpp":
            # An instance's or type's name may stand on either side of the class: Prefix/Class, Class/0.
            names |= {(group, result.name.split("/")[0]) for group in result.group.split("/")}
        else:
            names.add((result.group.rpartition(".")[2], result.name.split("[")[0]))
    return names


def check(rows: list[Wanted], exceptions: set[Wanted], cpp: Iterable[Result], py: Iterable[Result]) -> list[str]:
    """What is wrong, a line each."""
    run = {"cpp": names_run(cpp, "cpp"), "py": names_run(py, "py")}
    problems = []
    for row in rows:
        did_run, said = row.name in run[row.language], f"in {LANGUAGES[row.language]}"
        if did_run and row in exceptions:
            problems.append(f"{row.title} ran {said}: take its line out of row_exceptions.tsv")
        elif not did_run and row not in exceptions:
            problems.append(f"{row.title} did not run {said}: write it, or name it in row_exceptions.tsv")
    for each in sorted(exceptions - set(rows)):
        problems.append(f"row_exceptions.tsv names {each.group} {each.row} for {each.language}, rows.tsv does not")
    return problems


def check_files(
    cpp: Iterable[Result], py: Iterable[Result], is_wanted: Callable[[Wanted], bool] = lambda row: True
) -> list[str]:
    """Of the wanted rows."""
    try:
        rows, exceptions = (filter(is_wanted, read_rows(HERE / f"{name}.tsv")) for name in ("rows", "row_exceptions"))
    except (OSError, ValueError) as error:
        return [str(error)]
    return check(list(rows), set(exceptions), cpp, py)
