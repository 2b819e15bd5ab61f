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


def test_layouts_of_published_models(scale):
    assert len(MODELS) >= 7
    extent = scale.Extent(**EXTENT)
    found = {
        figure.name: figure for figure in scale.model_figures(BUILD, extent, [BENCHMARKS / "models/gpt-oss-20b.tsv"])
    }
    rows, flat = (found[f"GPT-OSS 20B on 300 ranks, {layout}: padding"] for layout in ("rows", "flat"))
    # 32 experts cannot be cut into more rows than 32; the other layout cuts anywhere.
    assert rows.value > 300
    assert 0 <= flat.value < 0.01
    assert rows.unit == flat.unit == "%"
    assert "GiB a rank" in rows.note


def test_setting_up_many_tensors(scale):
    found = {figure.name: figure for figure in scale.large_figures(BUILD, scale.Extent(**EXTENT))}
    for wrap in scale.WRAPS:
        assert found[f"{wrap}, set-up of 200 tensors"].unit == "s"
        resident = found[f"{wrap}, set-up of 200 tensors: resident set"]
        assert resident.unit == "MiB"
        assert resident.value > 0, wrap


def test_what_grows_is_told_beside_the_smallest(scale):
    values = [(scale.case_of("C++ replicate", size), cost) for size, cost in (("8x9x2", 50e3), ("64x9x2", 75e3))]
    told = list(scale.growth("replicate, a step", "units", values))
    assert [figure.note for figure in told] == ["1.000 x of 8", "1.500 x of 8"]
    assert told[1].name == "replicate, a step: 64 units"
    assert told[1].value == 75


def test_a_set_up_costs_as_much_for_each_tensor_however_many_there_are(scale):
    sizes = ("20x20x2", "80x20x2", "4x400x2")
    totals = scale.callgrind.count_once({"C++": scale.setup_command(BUILD, sizes)})
    for wrap in scale.WRAPS:
        few, *more = (totals[scale.case_of(f"C++ {wrap}", size)] for size in sizes)
        for many in more:
            assert many / 1600 < 1.15 * few / 400, wrap
