"""The list of mutants fits the code."""

from __future__ import annotations

from mutant import NOT_NOTICED, read_table

MUTANTS = read_table()


def test_every_mutant_has_one_place_and_a_name_of_its_own():
    changed = [mutant.name for mutant in MUTANTS if mutant.changed() and mutant.old != mutant.new]
    assert len(set(changed)) == len(MUTANTS)


def test_the_table_has_a_test_for_each_mutant_and_language():
    for mutant in MUTANTS:
        in_python_alone = mutant.is_in_package or mutant.is_in_extension
        assert bool(mutant.cpp) != in_python_alone, mutant.name
        assert mutant.cpp or mutant.python, mutant.name
        assert not {"?", NOT_NOTICED} & {mutant.cpp, mutant.python}, mutant.name
