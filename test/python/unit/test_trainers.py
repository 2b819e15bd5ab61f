"""test/trainers/compare.py: what it calls the same, and the page that it writes."""

from pathlib import Path
from typing import Any

import pytest
import tables
import torch
from trainers import compare


def leave(folder: Path, engine: str, **changed: Any) -> None:
    left = {"steps": [torch.ones(())], "tensors": {"weight": torch.zeros(2)}, "engines": [engine]}
    torch.save(left | changed, folder / f"one.{engine}.case.0")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, ""),
        ({"steps": [torch.full((), 1 + 2**-23)]}, "rank 0: 1 of 2 differ, first value 0"),
        ({"steps": [torch.full((), torch.nan)]}, "rank 0: 1 of 2 differ, first value 0"),
        ({"tensors": {"weight": torch.zeros(2, dtype=torch.double)}}, "rank 0: 1 of 2 differ, first weight"),
        ({"tensors": {}}, "tensors have other names"),
        ({"steps": []}, "1 and 0 steps"),
        ({"engines": ["torch"]}, "engines were ['torch'] and ['torch']"),
    ],
)
def test_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], found: str) -> None:
    monkeypatch.setattr(compare, "FOLDER", tmp_path)
    leave(tmp_path, "torch")
    assert compare.compared("one", "case", 1) == "left no one.shardwise.case.0"
    leave(tmp_path, "shardwise", **changed)
    assert compare.compared("one", "case", 1) == found


def test_the_page_has_the_table(tmp_path: Path) -> None:
    copy = tmp_path / "page"
    copy.write_text(compare.PAGE.read_text())
    compare.write_page(copy)
    assert copy.read_text() == compare.PAGE.read_text(), "make test-trainers writes it"
    known = compare.known_trainers()
    for row in tables.read(compare.HERE / "trainers.tsv"):
        assert row["trainer"] in known and row["ranks"] in ("2", "4"), row
