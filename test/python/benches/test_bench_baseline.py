"""What a step costs exactly is what benchmarks/baseline.json says."""

from __future__ import annotations

import json

import baseline
from bench_modules import BUILD


def test_a_step_costs_what_it_did():
    assert not baseline.callgrind.problem(BUILD)
    saved = json.loads(baseline.FILE.read_text())
    found = list(baseline.problems(saved, baseline.measure(BUILD)))
    assert not found, "\n".join([*found, baseline.REWRITE, f"Other versions: {baseline.other_versions(saved)}"])


def test_units_of_the_baseline_gather_and_sum_as_their_plan_says():
    cases = json.loads(baseline.FILE.read_text())["cases"]
    # Four blocks and the model around them, which has no parameters of its own.
    assert cases["C++ fully_shard"]["all_gathers"] == 7
    assert cases["C++ fully_shard_keep"]["all_gathers"] == 4
    for name, counted in cases.items():
        assert counted["reduce_scatters" if "fully_shard" in name else "all_reduces"] == 4, name
        assert counted["allocations"] == counted["comparisons"] == counted["broadcasts"] == 0, name
