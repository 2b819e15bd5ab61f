"""The suite `memory`, in small: what is allocated is what the formula says."""

from __future__ import annotations

import re

import pytest
from bench_modules import BUILD, imported


@pytest.fixture
def memory(monkeypatch):
    for modules in imported(monkeypatch):
        yield modules["memory"]


def test_tensors_of_a_step_are_what_the_formula_says(memory):
    names = ("C++ fully_shard", "C++ fully_shard_keep", "C++ fully_shard_flat", "C++ replicate")
    found = {figure.name: figure for figure in memory.allocator_figures(BUILD, memory.Size(4, 192), names)}
    for name in names:
        for words in memory.PEAKS.values():
            figure = found[f"{name}: {words}"]
            assert figure.unit == "P"
            times = re.fullmatch(r"[\d.]+ MiB, ([\d.]+) x the formula's", figure.note)
            assert times, figure.note
            assert float(times[1]) >= 0.9999, figure
            # Activations come on top; in backward also gradients whose sum is late, as many as chance has it.
            if words != memory.PEAKS["backward_peak"]:
                assert float(times[1]) < (1.02 if words == memory.PEAKS["after_step"] else 1.1), figure
        assert found[f"{name}: allocations in forward and backward"].note == "0 of them by the engine"
    kept, freed = (found[f"C++ {wrap}: the most in forward"].value for wrap in ("fully_shard_keep", "fully_shard"))
    assert kept > freed


def test_the_resident_set_of_each_is_compared_with_ddps(memory):
    names = ("C++ fully_shard", "Python fully_shard", "Python ddp")
    found = list(memory.resident_figures(BUILD, memory.Size(2, 192), names))
    assert [figure.name.split(":")[0] for figure in found] == ["DDP", "C++ fully_shard", "Python fully_shard"]
    assert found[0].note == "1.000 x DDP"
    assert all(figure.unit == "MiB" and figure.value > 1 for figure in found)
    assert "1.0 M parameters, 2 ranks" in found[0].name
