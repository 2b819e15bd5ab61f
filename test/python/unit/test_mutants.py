"""The list of mutants fits the code."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "test" / "mutants"))

from mutants import MUTANTS  # noqa: E402

TABLE = ROOT / "test" / "mutants" / "noticed.tsv"

sys.path.pop()  # it has a run.py, as test has


def test_every_mutant_has_one_place():
    found = {mutant.name: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_every_mutant_changes_something_under_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert [mutant.name for mutant in MUTANTS if mutant.old == mutant.new] == []


def test_the_table_has_a_test_for_each_mutant_and_language():
    header, *rows = [line.split("\t") for line in TABLE.read_text().splitlines()]
    assert header == ["mutant", "cpp", "python"]
    assert [row[0] for row in rows] == [mutant.name for mutant in MUTANTS]
    for mutant, (_, cpp, python) in zip(MUTANTS, rows, strict=True):
        in_python_alone = mutant.is_in_package or mutant.is_in_extension
        assert bool(cpp) != in_python_alone, mutant.name
        assert bool(python) == ("Python" in mutant.languages), mutant.name
        assert "(not noticed)" not in (cpp, python), mutant.name
