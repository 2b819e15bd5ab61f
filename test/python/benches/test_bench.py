"""The benchmarks, in small: they run, their figures have units, and what is compared is what is named."""

from __future__ import annotations

import re

import pytest
from bench_modules import BENCHMARKS, BUILD, imported


@pytest.fixture
def modules(monkeypatch):
    yield from imported(monkeypatch)


def test_units_cost_something_and_the_wrappings_differ(modules):
    host = modules["host"]
    wraps = ("fully_shard", "fully_shard_keep", "fully_shard_flat", "replicate", "none")
    commands = host.commands(BUILD, ["4x3x2"])
    costs = host.microseconds({"C++": commands["C++"]})
    assert all(cost > 0 for cost in costs.values())
    found = {figure.name: figure for figure in host.figures(costs, "us", 1)}
    for wrap in wraps:
        assert found[f"C++ {wrap}, 4 blocks of 3"].unit in ("us a unit", "us a block")
    assert {figure.unit for name, figure in found.items() if "call" in name} == {"us a call"}


def test_wrappings_in_python_are_compared_with_torchs(modules):
    host = modules["host"]
    only = ("none", "fsdp2", "fully_shard", "fully_shard_keep", "replicate", "torch_replicate")
    commands = host.commands(BUILD, ["2x9x2"], only)
    costs = host.microseconds({"Python": commands["Python"]})
    found = {figure.name.split(",")[0]: figure for figure in host.figures(costs, "us", 1)}
    assert {name.split(" ")[-1] for name in found} >= {"fully_shard", "fully_shard_keep", "FSDP2", "none"}
    for ours, torchs in (("Python fully_shard", "FSDP2"), ("Python replicate", "torch's replicate")):
        assert re.fullmatch(rf"[-+\d.e]+ x {torchs}", found[ours].note)


def test_counts_are_differences_of_two_lengths(modules, tmp_path):
    callgrind = modules["callgrind"]
    for number, (steps, total) in enumerate(((1, 900), (5, 1500), (1, 700), (5, 1600))):
        text = f"desc: Trigger: Client Request: none 8x9x2 {steps}\ntotals: {total}\n"
        (tmp_path / f"C++.{number}").write_text(text)
    counts = callgrind.read_counts(tmp_path / "C++")
    assert callgrind.differences("C++", counts) == {callgrind.Case("C++ none", 8, 9, 2): 200}


def test_steps_of_ranks_are_counted_and_compared(modules):
    steps = modules["steps"]
    names = ["C++ fully_shard", "C++ replicate", "Python fully_shard"]
    size = steps.Size(layers=1, width=96, heads=2, world=2, rounds=2, steps=2)
    figures = steps.figures(steps.measure(BUILD, size, names))
    found = {figure.name.removeprefix("0 M, 2 ranks: "): figure for figure in figures}
    assert found["DDP: step"].value == 1
    assert found["DDP: step"].unit == "x DDP"
    assert found["C++ fully_shard: step"].value > 0
    # A block and the rest, each gathered in forward; the block again in backward.
    assert found["C++ fully_shard: all-gathers"].value == 3
    assert found["C++ fully_shard: reduce-scatters"].value == 2
    assert found["C++ replicate: all-reduces"].value == 2
    assert found["DDP: allreduce"].value == 1
    assert found["Python fully_shard: allgather_base"].value == 3
    assert found["C++ fully_shard: buffers allocated"].value == 0
    # Parameters, gradients and two of AdamW's, of which a rank has half.
    assert found["C++ replicate: tensors between steps"].value == pytest.approx(4, rel=0.02)
    # The pool keeps full copies of two units, a gather and a bucket, each as large as the largest unit may need.
    assert 2 < found["C++ fully_shard: tensors between steps"].value < 4
    for wrap in ("C++ fully_shard", "C++ replicate", "DDP"):
        assert found[f"{wrap}: tensors at the peak"].value > found[f"{wrap}: tensors between steps"].value
        assert found[f"{wrap}: resident set at the peak"].value > 0
    # What DDP sends cannot be less; small messages of others, and headers, come on top.
    assert found["DDP: on the wire"].value >= 2
    assert found["DDP: on the wire"].note == "2 P are needed"
    assert found["C++ replicate: on the wire"].note.startswith("2")
    assert 2 < float(found["C++ fully_shard: on the wire"].note.split()[0]) < 3


def test_a_rank_that_fails_ends_the_benchmark(modules):
    steps = modules["steps"]
    size = steps.Size(layers=1, width=96, heads=2, world=2, rounds=1, steps=1)
    with pytest.raises(RuntimeError, match="a rank of C\\+\\+ nothing ended early"):
        steps.measure(BUILD, size, ["C++ nothing"])


def test_figures_are_saved_with_machine_date_commit_and_versions(modules, tmp_path):
    figure = modules["figures"].Figure("host", "C++ replicate, 8 blocks", 12.345, "us a unit", "0.1 x DDP")
    for figures in ([figure, figure], [figure]):  # the last ones stay
        assert modules["figures"].save(tmp_path, modules["machine"].facts(), figures) == [tmp_path / "host.json"]
    saved = modules["figures"].load(tmp_path)["host"]
    assert {"date", "commit", "machine", "torch", "shardwise", "valgrind"} <= saved.facts.keys()
    assert saved.figures == (figure,)
    assert figure.line().split("  ")[0] == "host"
    assert figure.line().endswith("  12.3  us a unit  (0.1 x DDP)")


def test_results_in_the_repository_are_what_the_command_saves(modules, tmp_path):
    results = BENCHMARKS / "results"
    found = modules["figures"].load(results)
    assert found
    for suite, saved in found.items():
        modules["figures"].save(tmp_path, saved.facts, saved.figures)
        assert (tmp_path / f"{suite}.json").read_text() == (results / f"{suite}.json").read_text()


def test_collectives_are_compared_with_gloo(modules):
    collectives = modules["collectives"]
    figures = list(collectives.figures(BUILD, collectives.Extent((2,), (4 << 10, 1 << 20), 2)))
    assert [figure.name.split()[0] for figure in figures[::2]] == list(collectives.OPERATIONS)
    assert figures[1].name == "all_gather of 1 MB, 2 ranks"
    assert {figure.unit for figure in figures} == {"x Gloo"}
    assert all(figure.value > 0 and re.fullmatch(r"[\d.e+]+ ms, Gloo [\d.e+]+ ms", figure.note) for figure in figures)
