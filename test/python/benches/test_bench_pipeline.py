"""The suite `pipeline`, in small: what ranks wait is a share, and the picture shows what stages did."""

from __future__ import annotations

import re

from bench_modules import BUILD, imported

from shardwise import _timeline


def test_waits_are_beside_what_is_predicted(monkeypatch, tmp_path):
    (modules,) = imported(monkeypatch)
    pipeline = modules["pipeline"]
    extent = pipeline.Extent(32, 4, 4, 1, 2)
    found = list(pipeline.figures(BUILD, extent))
    assert [figure.name.split(":")[0] for figure in found] == list(pipeline.SCHEDULES)
    assert all(0 < figure.value < 100 for figure in found)
    predicted = [float(re.match(r"predicted ([\d.]+) %", figure.note)[1]) for figure in found]
    # Of four microbatches on two ranks: a forward and a backward of a stage, of five; half of it with two stages.
    assert predicted[:3] == [20, 20, 11.1]
    assert predicted[4] < predicted[2]
    pipeline.draw(BUILD, extent, tmp_path / "pipeline.svg")
    assert f'fill="{_timeline.COLORS["stage"]}">' in (tmp_path / "pipeline.svg").read_text()
