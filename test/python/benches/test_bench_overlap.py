"""The suite `overlap`, in small: the wire is as slow as it is told to be, and the picture shows what was recorded."""

from __future__ import annotations

import pytest
from bench_modules import BUILD, imported

from shardwise import _timeline


@pytest.fixture
def overlap(monkeypatch):
    for modules in imported(monkeypatch):
        yield modules["overlap"]


def test_a_step_takes_no_less_than_the_wire(overlap, tmp_path):
    extent = overlap.Extent(2, 96, (1.0,), 1, 2)
    for wrap in overlap.WRAPS:
        words = overlap.command(BUILD, wrap, extent, str(tmp_path / wrap))
        program = overlap.Program.start(wrap, words, 2)
        try:
            program.answers()
            (first, _) = program.ask("2 1000 2 1")
            carried = first["bytes"] / 2e6
            # And a latency for each of at most twenty collectives.
            assert carried + 0.002 <= first["busy_seconds"] <= carried + 0.02
            assert min(first["seconds"]) >= 0.99 * first["busy_seconds"]
            assert program.ask("1 0 0 1")[0]["busy_seconds"] == 0
        finally:
            program.end()


def test_shares_are_of_the_wire_and_the_picture_is_of_two_steps(overlap, tmp_path):
    extent = overlap.Extent(2, 96, (1.0,), 1, 2)
    found = {figure.name: figure for figure in overlap.figures(BUILD, extent)}
    assert list(found) == [
        "fully_shard: hidden, wire busy 100%",
        "fully_shard, nothing gathered ahead: hidden, wire busy 100%",
        "fully_shard_keep: hidden, wire busy 100%",
        "replicate: hidden, wire busy 100%",
    ]
    for figure in found.values():
        assert figure.unit == "%"
        assert "ms on the wire in a step" in figure.note
    overlap.draw(BUILD, extent, tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    for kind in ("forward", "backward", "all-gather", "reduce-scatter"):
        assert f'fill="{_timeline.COLORS[kind]}">' in text
