"""The row check: names on both sides, exceptions, and tables that are wrong."""

from __future__ import annotations

import pytest
from check_rows import Wanted, check, read_rows
from reports import FAILED, PASSED, SKIPPED, Result

CPP = Wanted("Replicate1DTrainingCore", "train_parity_single_group", "cpp")
PY = Wanted("Replicate1DTrainingCore", "train_parity_single_group", "py")
ROWS = "file\tclass\trow\tlanguages\tnote\n"


def cpp(group: str, name: str, outcome: str = PASSED) -> Result:
    return Result("rank_tests", group, name, outcome)


def py(group: str, name: str, outcome: str = PASSED) -> Result:
    return Result("pytest", f"test.python.ranks.test_replicate_training.{group}", name, outcome)


RAN_CPP = cpp("Replicate1DTrainingCore", "TrainParitySingleGroup")
RAN_PY = py("TestReplicate1DTrainingCore", "test_train_parity_single_group")


@pytest.mark.parametrize(
    ("group", "name", "outcome", "is_the_row"),
    [
        ("Worlds/Replicate1DTrainingCore", "TrainParitySingleGroup/2", PASSED, True),
        ("Types/Replicate1DTrainingCore/float", "TrainParitySingleGroup", FAILED, True),
        ("Replicate1DTrainingCore", "TrainParitySingleGroup", SKIPPED, False),
        ("Replicate1DTrainingCore", "TrainParitySingleGroups", PASSED, False),
        ("FullyShard1DTrainingCore", "TrainParitySingleGroup", PASSED, False),
    ],
)
def test_what_is_a_row_in_cpp(group, name, outcome, is_the_row):
    problems = check([CPP, PY], set(), [cpp(group, name, outcome)], [RAN_PY])
    assert len(problems) == (not is_the_row)
    assert is_the_row or "Replicate1DTrainingCore.TrainParitySingleGroup did not run in C++" in problems[0]


@pytest.mark.parametrize(
    ("name", "outcome", "is_the_row"),
    [
        ("test_train_parity_single_group[2-True]", PASSED, True),
        ("test_train_parity_single_groups", PASSED, False),
        ("test_train_parity_single_group[cuda]", SKIPPED, False),
    ],
)
def test_what_is_a_row_in_python(name, outcome, is_the_row):
    ran = py("TestReplicate1DTrainingCore", name, outcome)
    problems = check([CPP, PY], set(), [RAN_CPP], [ran])
    assert len(problems) == (not is_the_row)
    said = "TestReplicate1DTrainingCore::test_train_parity_single_group did not run in Python"
    assert is_the_row or said in problems[0]
    assert check([PY], set(), [], [ran, RAN_PY]) == [], "one parameter that ran is enough"


def test_an_exception_holds_for_its_side_alone():
    assert check([CPP, PY], {CPP}, [], [RAN_PY]) == []
    (problem,) = check([CPP, PY], {CPP}, [], [])
    assert "in Python" in problem
    (problem,) = check([CPP, PY], {CPP}, [RAN_CPP], [RAN_PY])
    assert "ran in C++: take its line out of row_exceptions.tsv" in problem
    (problem,) = check([CPP], {Wanted(CPP.group, "other", "cpp")}, [RAN_CPP], [])
    assert f"names {CPP.group} other for cpp" in problem


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (f"{ROWS}f\tC\ta\tcpp\n", "table:2: there must be 5 columns"),
        (f"{ROWS}f\tC\ta\tcpp,rust\t\n", "not 'rust'"),
        (f"{ROWS}f\tC\ta\tcpp\t\nf\tC\ta\tcpp\t\n", "C a stands there more than once for cpp"),
        ("class\trow\tlanguages\treason\nC\ta\tcpp\t\n", "an exception needs a reason"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, table, message):
    (tmp_path / "table").write_text(table)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "table")
