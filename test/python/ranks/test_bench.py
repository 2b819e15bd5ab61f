"""The benchmarks, in small: they run, their figures have units, and what is compared is what is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
BUILD = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")


@pytest.fixture
def modules(monkeypatch):
    """What lies beside benchmarks/run.py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import collectives
    import figures
    import host
    import machine
    import ranks

    yield {"collectives": collectives, "figures": figures, "host": host, "machine": machine, "ranks": ranks}
    for module in (collectives, figures, host, machine, ranks):
        monkeypatch.delitem(sys.modules, module.__name__)


def test_units_cost_something_and_the_wrappings_differ(modules):
    host = modules["host"]
    commands = {"C++": host.programs(BUILD)["C++"]}
    costs = host.microseconds(commands, [4])
    assert all(cost > 0 for cost in costs.values())
    found = {figure.name: figure for figure in host.figures(costs, "us", 1)}
    for wrap in ("fully_shard", "fully_shard_keep", "fully_shard_flat", "replicate", "none"):
        assert found[f"C++ {wrap}, 4 blocks"].unit in ("us a unit", "us a block")
    assert {figure.unit for name, figure in found.items() if "call" in name} == {"us a call"}


def test_instructions_are_counted_or_it_is_said_why_not(modules):
    host = modules["host"]
    problem = host.valgrind_problem(BUILD)
    if problem:
        assert "install valgrind" in problem or "apt-get install valgrind" in problem
        return
    names = ("none", "replicate", "call", "call_hook")
    costs = host.instructions({"C++": host.programs(BUILD)["C++"]}, [2], only=names)
    assert costs.keys() == {(f"C++ {name}", 2) for name in names}
    found = {figure.name: figure for figure in host.figures(costs, "k instructions", 1e3)}
    # Counts: they hardly differ between machines.
    assert 10 < found["C++ replicate, 2 blocks"].value < 120
    assert found["C++ replicate, 2 blocks"].unit == "k instructions a unit"
    plain, hooked = (found[f"call() {which}"] for which in ("of a module without hooks", "with one forward pre-hook"))
    assert 0 < plain.value < hooked.value < 20
    assert plain.unit == "k instructions a call"


def test_without_valgrind_a_line_says_so(modules, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert modules["host"].valgrind_problem(BUILD) == (
        "there is no valgrind on the PATH (Debian, Ubuntu: apt-get install valgrind)"
    )


def test_steps_of_ranks_are_counted_and_compared(modules):
    ranks = modules["ranks"]
    names = ["C++ fully_shard", "C++ replicate", "Python ddp"]
    found = {figure.name: figure for figure in ranks.figures(ranks.measure(BUILD, ranks.Size(1, 96, 2, 2), names))}
    assert found["DDP: step"].value == 1
    assert found["DDP: step"].unit == "x DDP"
    assert found["C++ fully_shard: step"].value > 0
    # A block and the rest, each gathered in forward; the block again in backward.
    assert found["C++ fully_shard: all-gathers"].value == 3
    assert found["C++ fully_shard: reduce-scatters"].value == 2
    assert found["C++ replicate: all-reduces"].value == 2
    assert found["DDP: allreduce"].value == 1
    assert found["C++ fully_shard: buffers allocated"].value == 0
    # Parameters, gradients and two of AdamW's, of which a rank has half.
    assert found["C++ replicate: tensors between steps"].value == pytest.approx(4, rel=0.02)
    # The pool keeps full copies of two units, a gather and a bucket, each as large as the largest unit may need.
    assert 2 < found["C++ fully_shard: tensors between steps"].value < 4
    for wrap in ("C++ fully_shard", "C++ replicate", "DDP"):
        assert found[f"{wrap}: tensors at the peak"].value > found[f"{wrap}: tensors between steps"].value
        assert found[f"{wrap}: resident set at the peak"].value > 0


def test_a_rank_that_fails_ends_the_benchmark(modules):
    ranks = modules["ranks"]
    with pytest.raises(RuntimeError, match="a rank of C\\+\\+ nothing ended early"):
        ranks.measure(BUILD, ranks.Size(1, 96, 1, 1), ["C++ nothing"])


def test_figures_are_saved_with_machine_date_commit_and_versions(modules, tmp_path):
    figure = modules["figures"].Figure("host", "C++ replicate, 8 blocks", 12.345, "us a unit", "0.1 x DDP")
    data, table = modules["figures"].save(tmp_path, modules["machine"].facts(), [figure])
    saved = json.loads(data.read_text())
    assert {"date", "commit", "machine", "torch", "shardwise", "valgrind"} <= saved["facts"].keys()
    assert saved["figures"] == [vars(figure)]
    assert "| host | C++ replicate, 8 blocks | 12.3 | us a unit | 0.1 x DDP |" in table.read_text()
    assert figure.line().split("  ")[0] == "host"
    assert figure.line().endswith("  12.3  us a unit  (0.1 x DDP)")


def test_the_command_says_what_is_missing(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--quick"]
    environment = {**os.environ, "SHARDWISE_BUILD_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Run `make bench`" in done.stderr


def test_results_in_the_repository_are_what_the_command_saves(modules):
    tables = sorted((BENCHMARKS / "results").glob("*.md"))
    assert tables, "there is a first result"
    for table in tables:
        facts = json.loads(table.with_suffix(".json").read_text())["facts"]
        assert f"- commit: {facts['commit']}" in table.read_text()


def test_collectives_are_compared_with_gloo(modules):
    collectives = modules["collectives"]
    figures = list(collectives.figures(BUILD, collectives.Extent((2,), (4 << 10, 1 << 20), 2)))
    assert [figure.name.split()[0] for figure in figures[::2]] == list(collectives.OPERATIONS)
    assert figures[1].name == "all_gather of 1 MB, 2 ranks"
    assert {figure.unit for figure in figures} == {"x Gloo"}
    assert all(figure.value > 0 and re.fullmatch(r"[\d.e+]+ ms, Gloo [\d.e+]+ ms", figure.note) for figure in figures)
