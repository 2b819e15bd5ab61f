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
