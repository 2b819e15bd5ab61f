"""What a step costs exactly is what benchmarks/baseline.json says."""

from __future__ import annotations

import json

import baseline
from checkout import BUILD


def test_a_step_costs_what_it_did():
    assert not baseline.callgrind.problem(BUILD)
    saved = json.loads(baseline.FILE.read_text())
    found = list(baseline.problems(saved, baseline.measure(BUILD)))
    assert not found, "\n".join([*found, baseline.REWRITE, f"Other versions: {baseline.other_versions(saved)}"])
