"""The suite `checkpoint`, in small."""

from __future__ import annotations

import pytest
from bench_modules import imported


@pytest.fixture
def checkpoint(monkeypatch):
    for modules in imported(monkeypatch):
        yield modules["checkpoint"]


def test_figures_of_a_short_run(checkpoint):
    figures = {figure.name: figure for figure in checkpoint.suite(checkpoint.SHORT)}
    speeds = [figure.value for figure in figures.values() if figure.unit == "GB/s"]
    assert len(speeds) == 5 and all(0 < speed < 100 for speed in speeds)
    assert figures["shardwise: what Saver.save() keeps a step waiting"].value > 0
    # 50 MB on two ranks: saving holds nothing twice.
    assert figures["shardwise: memory of a rank for a save"].value < 25


def test_ratios_are_of_the_same_turn(checkpoint):
    names = ("plain", "shardwise", "dcp", "copy", "shardwise stall", "dcp stall", "shardwise load", "dcp load")
    seconds = {name: [1.0, 10.0, 2.0] for name in names}
    seconds["dcp"] = [3.0, 30.0, 6.0]
    seconds["copy"] = [0.5, 5.0, 1.0]
    memory = {name: float(number) for number, name in enumerate(names)}
    figures = {figure.name: figure for figure in checkpoint.figures(4 * 10**9, seconds, memory)}
    assert figures["shardwise: save"].value == pytest.approx(2)
    assert figures["shardwise: save"].note == "1.00 x a plain write, 3.00 x DCP"
    assert figures["shardwise: what Saver.save() keeps a step waiting"].note == "2.00 x a copy, 1.00 x DCP"
    assert figures["DCP: memory of a rank for a save"].value == 2
