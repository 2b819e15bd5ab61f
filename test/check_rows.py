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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from reports import SKIPPED, Result

HERE = Path(__file__).resolve().parent
ROW_COLUMNS = ["file", "class", "row", "languages", "note"]
EXCEPTION_COLUMNS = ["class", "row", "language", "reason"]
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


class TableError(Exception):
    """A table that cannot be read as it should be."""


def cpp_name(row: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in row.split("_"))


def read_table(path: Path, columns: list[str]) -> list[dict[str, str]]:
    """The lines of a table whose first line names the columns; the last column may be empty."""
    lines = path.read_text().splitlines()
    if not lines or lines[0].split("\t") != columns:
        raise TableError(f"{path.name}: the first line must be {' '.join(columns)}, separated by tabs")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        cells = line.split("\t")
        if len(cells) != len(columns) or not all(cells[:-1]):
            raise TableError(f"{path.name}:{number}: there must be {len(columns)} columns, separated by tabs")
        rows.append(dict(zip(columns, cells, strict=True)))
    return rows


def known_rows(path: Path, columns: list[str]) -> dict[str, dict[str, str]]:
    """The lines of a table that a program writes, by their first cells; none if it cannot be read."""
    try:
        return {line[columns[0]]: line for line in read_table(path, columns)}
    except (OSError, TableError):
        return {}


def write_row(path: Path, columns: list[str], row: list[str], order: Iterable[str]) -> None:
    """Puts it in the place of the line with the same first cell. The lines have this order."""
    known = {name: list(line.values()) for name, line in known_rows(path, columns).items()} | {row[0]: row}
    lines = [columns, *(known[name] for name in order if name in known)]
    path.write_text("".join("\t".join(line) + "\n" for line in lines))


def read_rows(path: Path) -> list[Wanted]:
    lines = read_table(path, ROW_COLUMNS)
    return _wanted(path, ((line, language) for line in lines for language in line["languages"].split(",")))


def read_exceptions(path: Path) -> dict[Wanted, str]:
    lines = read_table(path, EXCEPTION_COLUMNS)
    reasons = [line["reason"].strip() for line in lines]
    if not all(reasons):
        raise TableError(f"{path.name}: {lines[reasons.index('')]['row']}: an exception needs a reason")
    return dict(zip(_wanted(path, ((line, line["language"]) for line in lines)), reasons, strict=True))


def _wanted(path: Path, named: Iterable[tuple[dict[str, str], str]]) -> list[Wanted]:
    found: dict[Wanted, None] = {}
    for line, language in named:
        one = Wanted(line["class"], line["row"], language)
        if language not in LANGUAGES:
            raise TableError(f"{path.name}: {one.row}: a language is cpp or py, not {language!r}")
        if one in found:
            raise TableError(f"{path.name}: {one.group} {one.row} stands there more than once for {language}")
        found[one] = None
    return list(found)


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


def check(
    rows: Iterable[Wanted], exceptions: dict[Wanted, str], cpp: Iterable[Result], py: Iterable[Result]
) -> list[str]:
    """What is wrong, a line each."""
    rows = list(rows)
    run = {"cpp": names_run(cpp, "cpp"), "py": names_run(py, "py")}
    problems = []
    for row in rows:
        did_run, said = row.name in run[row.language], f"in {LANGUAGES[row.language]}"
        if did_run and row in exceptions:
            problems.append(f"{row.title} ran {said}: take its line out of row_exceptions.tsv")
        elif not did_run and row not in exceptions:
            problems.append(f"{row.title} did not run {said}: write it, or name it in row_exceptions.tsv")
    for each in sorted(set(exceptions) - set(rows)):
        problems.append(f"row_exceptions.tsv names {each.group} {each.row} for {each.language}, rows.tsv does not")
    return problems


def check_files(
    cpp: Iterable[Result],
    py: Iterable[Result],
    is_wanted: Callable[[Wanted], bool] = lambda row: True,
    folder: Path = HERE,
) -> list[str]:
    """Of the wanted rows."""
    try:
        rows, exceptions = read_rows(folder / "rows.tsv"), read_exceptions(folder / "row_exceptions.tsv")
    except (OSError, TableError) as error:
        return [str(error)]
    chosen = {row: reason for row, reason in exceptions.items() if is_wanted(row)}
    return check(filter(is_wanted, rows), chosen, cpp, py)
