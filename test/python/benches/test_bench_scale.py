"""The suite `scale`, in small: published models are whole, and growth is told."""

from __future__ import annotations

import json

import pytest
from bench_modules import BENCHMARKS, BUILD, imported

MODELS = sorted((BENCHMARKS / "models").glob("*.tsv"))
EXTENT = {
    "units": (),
    "parameters": (),
    "ranks": (),
    "setups": ("4x5x2", "8x5x2"),
    "large": "20x10x2",
    "worlds": (8, 300),
}


@pytest.fixture
def scale(monkeypatch):
    for modules in imported(monkeypatch):
        yield modules["scale"]


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_models_have_as_many_parameters_as_published(scale, file):
    lines = scale.run([str(BUILD / "benchmarks" / "cpp" / "plan_models"), str(file), "8"]).splitlines()
    assert {json.loads(line)["parameters"] for line in lines} == {scale.published_parameters(file)}


def test_setting_up_many_tensors(scale):
    found = {figure.name: figure for figure in scale.large_figures(BUILD, scale.Extent(**EXTENT))}
    for wrap in scale.WRAPS:
        assert found[f"{wrap}, set-up of 200 tensors"].unit == "s"
        resident = found[f"{wrap}, set-up of 200 tensors: resident set"]
        assert resident.unit == "MiB"
        assert resident.value > 0, wrap


def test_a_set_up_costs_as_much_for_each_tensor_however_many_there_are(scale):
    sizes = ("20x20x2", "80x20x2", "4x400x2")
    totals = scale.callgrind.count_once({"C++": scale.setup_command(BUILD, sizes)})
    for wrap in scale.WRAPS:
        few, *more = (totals[scale.case_of(f"C++ {wrap}", size)] for size in sizes)
        for many in more:
            assert many / 1600 < 1.15 * few / 400, wrap
