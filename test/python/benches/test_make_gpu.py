"""`make gpu DEVICE=late`: the script for machines with a GPU really runs, without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from checkout import ROOT

STEPS = "unit_tests rank_tests_1 nccl graph_rows profile"
#: Some tests of each slice are among them.
ONLY = "ReplicateGradients.*"


def make_gpu(folder, *words):
    command = [sys.executable, "test/on_gpu.py", *words, "--device", "late", "--folder", str(folder), "--only", ONLY]
    # Its own tests are not those of this run.
    dropped = ("SHARDWISE_TEST_", "PYTEST_", "GTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = ended.stdout.partition("\nstep ")[2].splitlines()[1:]
    return ended, {line.split()[0]: line.split()[1] for line in lines}


def test_each_step_does_its_work_or_says_what_is_missing(tmp_path):
    ended, table = make_gpu(tmp_path, *STEPS.split())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    graph = dict.fromkeys(("graph_rows_cpp", "graph_rows_python"), "missing")
    nccl = dict.fromkeys(("nccl_one_rank", "nccl_several_ranks", "nccl_cpp"), "passed")
    assert table == {"unit_tests": "passed", "rank_tests_1": "passed", **nccl, **graph, "profile": "passed"}
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in table}
    assert re.match(r"[1-9]\d* passed, 0 failed", found["rank_tests_1"]["said"])
    assert "needs a GPU" in found["graph_rows_cpp"]["said"] or "no CUDA kernels" in found["graph_rows_cpp"]["said"]
    assert "needs a GPU" in found["graph_rows_python"]["said"]
    for name in ("machine", "GPU", "driver", "torch", "NCCL", "commit", "date"):
        assert found["unit_tests"]["facts"][name]
    assert (tmp_path / "profile" / "step.svg").stat().st_size > 1000
