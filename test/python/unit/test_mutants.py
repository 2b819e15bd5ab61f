"""The list of mutants fits the code."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "test" / "mutants"))

from mutants import MUTANTS  # noqa: E402

sys.path.pop()  # it has a run.py, as test has


def test_every_mutant_has_one_place():
    found = {mutant.name: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_every_mutant_changes_something_under_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert [mutant.name for mutant in MUTANTS if mutant.old == mutant.new] == []
