"""The row check: names on both sides, exceptions, and tables that are wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "test"))

from check_rows import TableError, Wanted, check, check_files, cpp_name, read_exceptions, read_rows  # noqa: E402
from reports import FAILED, PASSED, SKIPPED, Result  # noqa: E402

CPP = Wanted("Replicate1DTrainingCore", "train_parity_single_group", "cpp")
PY = Wanted("Replicate1DTrainingCore", "train_parity_single_group", "py")
ROWS_HEAD = "file\tclass\trow\tlanguages\tnote\n"
EXCEPTIONS_HEAD = "class\trow\tlanguage\treason\n"


def cpp(group: str, name: str, outcome: str = PASSED) -> Result:
    return Result("rank_tests", group, name, outcome)


def py(group: str, name: str, outcome: str = PASSED) -> Result:
    return Result("pytest", f"test.python.ranks.test_replicate_training.{group}", name, outcome)


RAN_CPP = cpp("Replicate1DTrainingCore", "TrainParitySingleGroup")
RAN_PY = py("TestReplicate1DTrainingCore", "test_train_parity_single_group")


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("train_parity_single_group", "TrainParitySingleGroup"),
        ("1f1b_microbatching", "1f1bMicrobatching"),
        ("3d_with_tp_dp_pp", "3dWithTpDpPp"),
        ("to_float64_after_init", "ToFloat64AfterInit"),
    ],
)
def test_a_rows_name_in_cpp(row, name):
    assert cpp_name(row) == name


@pytest.mark.parametrize(
    ("group", "name", "outcome", "is_the_row"),
    [
        ("Replicate1DTrainingCore", "TrainParitySingleGroup", PASSED, True),
        ("Worlds/Replicate1DTrainingCore", "TrainParitySingleGroup/2", PASSED, True),
        ("Replicate1DTrainingCore/0", "TrainParitySingleGroup", PASSED, True),
        ("Types/Replicate1DTrainingCore/float", "TrainParitySingleGroup", PASSED, True),
        ("Replicate1DTrainingCore", "TrainParitySingleGroup", FAILED, True),
        ("Replicate1DTrainingCore", "TrainParitySingleGroup", SKIPPED, False),
        ("Replicate1DTrainingCore", "TrainParitySingleGroups", PASSED, False),
        ("FullyShard1DTrainingCore", "TrainParitySingleGroup", PASSED, False),
        ("TestReplicate1DTrainingCore", "test_train_parity_single_group", PASSED, False),
    ],
)
def test_what_is_a_row_in_cpp(group, name, outcome, is_the_row):
    problems = check([CPP, PY], {}, [cpp(group, name, outcome)], [RAN_PY])
    assert len(problems) == (not is_the_row)
    assert is_the_row or "Replicate1DTrainingCore.TrainParitySingleGroup did not run in C++" in problems[0]


@pytest.mark.parametrize(
    ("name", "outcome", "is_the_row"),
    [
        ("test_train_parity_single_group[2-True]", PASSED, True),
        ("test_train_parity_single_groups", PASSED, False),
        ("train_parity_single_group", PASSED, False),
        ("test_train", PASSED, False),
        ("test_train_parity_single_group[cuda]", SKIPPED, False),
    ],
)
def test_what_is_a_row_in_python(name, outcome, is_the_row):
    ran = py("TestReplicate1DTrainingCore", name, outcome)
    problems = check([CPP, PY], {}, [RAN_CPP], [ran])
    assert len(problems) == (not is_the_row)
    said = "TestReplicate1DTrainingCore::test_train_parity_single_group did not run in Python"
    assert is_the_row or said in problems[0]
    assert check([PY], {}, [], [ran, RAN_PY]) == [], "one parameter that ran is enough"


def test_an_exception_holds_for_its_side_alone():
    assert check([CPP, PY], {CPP: "why"}, [], [RAN_PY]) == []
    (problem,) = check([CPP, PY], {CPP: "why"}, [], [])
    assert "in Python" in problem
    (problem,) = check([CPP, PY], {CPP: "why"}, [RAN_CPP], [RAN_PY])
    assert "ran in C++: take its line out of row_exceptions.tsv" in problem


@pytest.mark.parametrize("change", [{"group": "Other"}, {"row": "other"}, {"language": "py"}])
def test_an_exception_for_no_row_is_a_problem(change):
    unknown = Wanted(**{"group": CPP.group, "row": CPP.row, "language": "cpp", **change})
    (problem,) = check([CPP], {unknown: "why"}, [RAN_CPP], [])
    assert f"names {unknown.group} {unknown.row} for {unknown.language}" in problem


def tables(folder: Path, rows: str, exceptions: str) -> Path:
    (folder / "rows.tsv").write_text(ROWS_HEAD + rows)
    (folder / "row_exceptions.tsv").write_text(EXCEPTIONS_HEAD + exceptions)
    return folder


def test_tables_are_read(tmp_path):
    folder = tables(tmp_path, "f\tC\ta_b\tcpp,py\t\nf\tC\tc\tpy\ta note\n", "C\ta_b\tcpp\tnot built yet\n")
    assert read_rows(folder / "rows.tsv") == [
        Wanted("C", "a_b", "cpp"),
        Wanted("C", "a_b", "py"),
        Wanted("C", "c", "py"),
    ]
    assert read_exceptions(folder / "row_exceptions.tsv") == {Wanted("C", "a_b", "cpp"): "not built yet"}
    ran = [py("TestC", "test_a_b"), py("TestC", "test_c")]
    assert check_files([], ran, folder=folder) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("f\tC\ta\tcpp\n", "rows.tsv:2: there must be 5 columns"),
        ("f\t\ta\tcpp\t\n", "rows.tsv:2: there must be 5 columns"),
        ("f\tC\ta\tcpp,rust\t\n", "not 'rust'"),
        ("f\tC\ta\tcpp\t\nf\tC\ta\tcpp\t\n", "C a stands there more than once for cpp"),
    ],
)
def test_wrong_rows_are_refused(tmp_path, rows, message):
    folder = tables(tmp_path, rows, "")
    with pytest.raises(TableError, match=message):
        read_rows(folder / "rows.tsv")
    assert message in check_files([], [], folder=folder)[0]


@pytest.mark.parametrize(
    ("exceptions", "message"),
    [
        ("C\ta\tcpp\t\n", "an exception needs a reason"),
        ("C\ta\tcpp\n", "row_exceptions.tsv:2: there must be 4 columns"),
        ("C\ta\tboth\twhy\n", "not 'both'"),
        ("C\ta\tcpp\twhy\nC\ta\tcpp\twhy not\n", "more than once"),
    ],
)
def test_wrong_exceptions_are_refused(tmp_path, exceptions, message):
    with pytest.raises(TableError, match=message):
        read_exceptions(tables(tmp_path, "", exceptions) / "row_exceptions.tsv")


def test_a_missing_table_is_a_problem(tmp_path):
    assert "rows.tsv" in check_files([], [], folder=tmp_path)[0]


def test_the_projects_own_tables_can_be_read():
    rows = read_rows(ROOT / "test" / "rows.tsv")
    assert len(rows) > 100
    assert set(read_exceptions(ROOT / "test" / "row_exceptions.tsv")) <= set(rows)
