"""The benchmarks, in small: they run, their figures have units, and what is compared is what is named."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import callgrind
import checkpoint
import collectives
import cycles
import host
import hosts
import machine
import memory
import overlap
import pipeline
import pytest
import scale
import steps
from checkout import BUILD, ROOT
from figures import Figure, load, save
from kinds import kind_of

from shardwise import _timeline


def test_units_cost_something_and_the_wrappings_differ():
    wraps = ("fully_shard", "fully_shard_keep", "fully_shard_flat", "replicate", "none")
    commands = host.commands(BUILD, ["4x3x2"])
    costs = host.microseconds({"C++": commands["C++"]})
    assert all(cost > 0 for cost in costs.values())
    found = {figure.name: figure for figure in host.figures(costs, "us", 1)}
    for wrap in wraps:
        assert found[f"C++ {wrap}, 4 blocks of 3"].unit in ("us a unit", "us a block")
    assert {figure.unit for name, figure in found.items() if "call" in name} == {"us a call"}


def test_wrappings_in_python_are_compared_with_torchs():
    only = ("none", "fsdp2", "fully_shard", "fully_shard_keep", "replicate", "torch_replicate")
    commands = host.commands(BUILD, ["2x9x2"], only)
    costs = host.microseconds({"Python": commands["Python"]})
    found = {figure.name.split(",")[0]: figure for figure in host.figures(costs, "us", 1)}
    assert {name.split(" ")[-1] for name in found} >= {"fully_shard", "fully_shard_keep", "FSDP2", "none"}
    for ours, torchs in (("Python fully_shard", "FSDP2"), ("Python replicate", "torch's replicate")):
        assert re.fullmatch(rf"[-+\d.e]+ x {torchs}", found[ours].note)


def test_steps_of_ranks_are_counted_and_compared():
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


def test_a_rank_that_fails_ends_the_benchmark():
    size = steps.Size(layers=1, width=96, heads=2, world=2, rounds=1, steps=1)
    with pytest.raises(RuntimeError, match="a rank of C\\+\\+ nothing ended early"):
        steps.measure(BUILD, size, ["C++ nothing"])


def test_figures_are_saved_with_machine_date_commit_and_versions(tmp_path):
    figure = Figure("host", "C++ replicate, 8 blocks", 12.345, "us a unit", "0.1 x DDP")
    for each in ([figure, figure], [figure]):  # the last ones stay
        assert save(tmp_path, machine.facts(), each) == [tmp_path / "host.json"]
    saved = load(tmp_path)["host"]
    assert {"date", "commit", "machine", "torch", "shardwise", "valgrind"} <= saved.facts.keys()
    assert saved.figures == (figure,)
    assert figure.line().split("  ")[0] == "host"
    assert figure.line().endswith("  12.3  us a unit  (0.1 x DDP)")


def test_collectives_are_compared_with_gloo():
    figures = list(collectives.figures(BUILD, collectives.Extent((2,), (4 << 10, 1 << 20), 2)))
    assert [figure.name.split()[0] for figure in figures[::2]] == list(collectives.OPERATIONS)
    assert figures[1].name == "all_gather of 1 MB, 2 ranks"
    assert {figure.unit for figure in figures} == {"x Gloo"}
    assert all(figure.value > 0 and re.fullmatch(r"[\d.e+]+ ms, Gloo [\d.e+]+ ms", figure.note) for figure in figures)


def test_figures_of_a_short_run():
    figures = {figure.name: figure for figure in checkpoint.suite(checkpoint.SHORT)}
    speeds = [figure.value for figure in figures.values() if figure.unit == "GB/s"]
    assert len(speeds) == 5 and all(0 < speed < 100 for speed in speeds)
    assert figures["shardwise: what AsyncSaver.save() keeps a step waiting"].value > 0
    # 50 MB on two ranks: saving holds nothing twice.
    assert figures["shardwise: memory of a rank for a save"].value < 25


def test_what_crosses_the_link_is_counted():
    if hosts.missing():
        pytest.skip(hosts.missing())
    found = {figure.name: figure for figure in hosts.suite(BUILD, *hosts.SHORT)}
    about = "0.1 M, 2 hosts of 2 ranks, 200 Mbit/s"
    assert set(found) == {
        f"{about}: {name}: {what}" for name in ("DDP", "Python replicate") for what in ("step", "over the link")
    }
    # An all-reduce among four ranks takes 1.5 of the parameters from each; half of the neighbours are elsewhere.
    assert 2.9 < found[f"{about}: DDP: over the link"].value < 4
    assert 2.9 < found[f"{about}: Python replicate: over the link"].value < 6


def test_tensors_of_a_step_are_what_the_formula_says():
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


def test_the_resident_set_of_each_is_compared_with_ddps():
    names = ("C++ fully_shard", "Python fully_shard", "Python ddp")
    found = list(memory.resident_figures(BUILD, memory.Size(2, 192), names))
    assert [figure.name.split(":")[0] for figure in found] == ["DDP", "C++ fully_shard", "Python fully_shard"]
    assert found[0].note == "1.000 x DDP"
    assert all(figure.unit == "MiB" and figure.value > 1 for figure in found)
    assert "1.0 M parameters, 2 ranks" in found[0].name


@pytest.mark.skipif(shutil.which("perf") is None, reason="needs Linux's perf")
def test_cycles_of_all_kinds_are_those_of_a_step():
    found = {figure.name: figure for figure in cycles.suite(BUILD, cycles.SHORT)}
    assert all(figure.unit == cycles.UNIT for figure in found.values())
    assert len(found) == len(cycles.SHORT.cases) * (len(cycles.KINDS) + 2)
    ours = {name.split(": ")[2]: figure.value for name, figure in found.items() if "C++ fully_shard" in name}
    assert ours["matrix products"] > ours["sums of ranks"] > 0
    assert ours["copies in memory"] > 0
    for figure in found.values():
        assert figure.value >= 0 or "waits" in figure.name


def test_kinds_of_functions():
    assert kind_of(cycles.KINDS, "/lib/libtorch_cpu.so", "mkl_blas_def_sgemm_kernel_0_zen") == "matrix products"
    assert kind_of(cycles.KINDS, "/lib/libtorch_cpu.so", "at::native::AVX2::mul_kernel") == "gradients into buckets"
    assert kind_of(cycles.KINDS, "[kernel.kallsyms]", "_copy_to_iter") == "copies to and from sockets"
    assert kind_of(cycles.KINDS, "[kernel.kallsyms]", "clear_page_erms") == "pages"
    assert kind_of(cycles.KINDS, "/lib/libshardwise.so", "shardwise::transport::add_up") == "sums of ranks"
    assert kind_of(cycles.KINDS, "/lib/libshardwise.so", "shardwise::engine::Unit::enter") == "the rest"


def test_instructions_are_told_by_the_kinds_of_their_functions(tmp_path: Path) -> None:
    head = "desc: Trigger: Client Request: {} 4x9x2 {}\n"
    body = """ob=(1) /lib/libshardwise.so
fn=(1) shardwise::engine::Order::enter
10 {}
cob=(2) /lib/libtorch_cpu.so
cfn=(2) at::_ops::mul_Tensor::call
calls=1 20
10 1000
ob=(2)
fn=(2)
20 {}
"""
    for number, (name, count, ours, torchs) in enumerate(
        (("none", 1, 0, 100), ("none", 3, 0, 300), ("fully_shard", 1, 40, 140), ("fully_shard", 3, 120, 420))
    ):
        (tmp_path / f"out.{number}").write_text(head.format(name, count) + body.format(ours, torchs))
    kinds = callgrind.count_kinds("C++", tmp_path / "out", host.kind)
    found = {figure.name.split(": ")[1]: 1e3 * figure.value for figure in host.kind_figures(kinds)}
    # A quarter of a step's, for four blocks: 40 of our own, and 40 of torch's beyond the same without wrapping.
    assert found == {"the order of units": pytest.approx(10), "torch": pytest.approx(10)}


def test_a_step_takes_no_less_than_the_wire(tmp_path):
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


def test_shares_are_of_the_wire_and_the_picture_is_of_two_steps(tmp_path):
    extent = overlap.Extent(2, 96, (1.0,), 1, 2)
    found = {figure.name: figure for figure in overlap.figures(BUILD, extent)}
    assert list(found) == [
        "fully_shard: hidden, wire busy 100%",
        "fully_shard, nothing gathered ahead: hidden, wire busy 100%",
        "fully_shard: step, 2 ranks, wire busy 100%",
        "fully_shard_keep: hidden, wire busy 100%",
        "fully_shard_keep: step, 2 ranks, wire busy 100%",
        "replicate: hidden, wire busy 100%",
        "replicate: step, 2 ranks, wire busy 100%",
    ]
    for name, figure in found.items():
        if "hidden" in name:
            assert figure.unit == "%"
            assert "ms on the wire in a step" in figure.note
        else:
            # Of one round on a busy machine; the saved figures are within a tenth.
            assert 0.5 < figure.value < 2
    overlap.draw(BUILD, extent, tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    for kind in ("forward", "backward", "all-gather", "reduce-scatter"):
        assert f'fill="{_timeline.COLORS[kind]}">' in text


def test_waits_are_beside_what_is_predicted(tmp_path):
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


MODELS = sorted((ROOT / "benchmarks" / "models").glob("*.tsv"))


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_models_have_as_many_parameters_as_published(file):
    lines = scale.run([str(BUILD / "benchmarks" / "cpp" / "plan_models"), str(file), "8"]).splitlines()
    found = [json.loads(line) for line in lines]
    assert {each["parameters"] for each in found} == {scale.published_parameters(file)}
    assert {each["layout"] for each in found} == {"rows", "flat", "FSDP2"}
    for each in found:
        assert max(each["compute"], each["wire"]) <= each["step"] <= each["compute"] + each["wire"]


def test_setting_up_many_tensors():
    found = {figure.name: figure for figure in scale.large_figures(BUILD, replace(scale.SHORT, large="20x10x2"))}
    for wrap in scale.WRAPS:
        assert found[f"{wrap}, set-up of 200 tensors"].unit == "s"
        resident = found[f"{wrap}, set-up of 200 tensors: resident set"]
        assert resident.unit == "MiB"
        assert resident.value > 0, wrap


def test_a_set_up_costs_as_much_for_each_tensor_however_many_there_are():
    sizes = ("20x20x2", "80x20x2", "4x400x2")
    totals = scale.callgrind.count_once({"C++": scale.setup_command(BUILD, sizes)})
    for wrap in scale.WRAPS:
        few, *more = (totals[scale.case_of(f"C++ {wrap}", size)] for size in sizes)
        for many in more:
            assert many / 1600 < 1.15 * few / 400, wrap
