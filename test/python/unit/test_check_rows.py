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
    ("ran_cpp", "ran_py", "missing"),
    [
        (cpp("Worlds/Replicate1DTrainingCore", "TrainParitySingleGroup/2"), RAN_PY, ""),
        (cpp("Types/Replicate1DTrainingCore/float", "TrainParitySingleGroup", FAILED), RAN_PY, ""),
        (cpp("Replicate1DTrainingCore", "TrainParitySingleGroup", SKIPPED), RAN_PY, CPP.title),
        (cpp("Replicate1DTrainingCore", "TrainParitySingleGroups"), RAN_PY, CPP.title),
        (cpp("FullyShard1DTrainingCore", "TrainParitySingleGroup"), RAN_PY, CPP.title),
        (RAN_CPP, py("TestReplicate1DTrainingCore", "test_train_parity_single_group[2-True]"), ""),
        (RAN_CPP, py("TestReplicate1DTrainingCore", "test_train_parity_single_groups"), PY.title),
        (RAN_CPP, py("TestReplicate1DTrainingCore", "test_train_parity_single_group[cuda]", SKIPPED), PY.title),
    ],
)
def test_what_is_a_row(ran_cpp, ran_py, missing):
    problems = check([CPP, PY], set(), [ran_cpp], [ran_py])
    assert [problem.partition(" did not run")[0] for problem in problems] == [missing] * bool(missing)
    assert check([CPP, PY], set(), [ran_cpp, RAN_CPP], [ran_py, RAN_PY]) == [], "one parameter that ran is enough"


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
