"""`make gpu DEVICE=late KIT=...` really runs: the script for machines with a GPU, and a kit, without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import gpu_kit
from checkout import BUILD, ROOT
from programs import copy_sources

STEPS = "build unit_tests rank_tests_1 nccl graph_rows profile"
#: Some tests of each slice are among them.
ONLY = "ReplicateGradients.*"


def make_gpu(folder, *words):
    """In a copy of the sources that has nothing but the kit."""
    kit, tree = folder / "kit", folder / "tree"
    kit.mkdir()
    gpu_kit.pack_kit(ROOT, BUILD, kit, "90")
    copy_sources(tree)
    options = ["--device", "late", "--folder", folder, "--only", ONLY, "--kit", kit]
    # Its own tests are not those of this run.
    dropped = ("SHARDWISE_TEST_", "PYTEST_", "GTEST_", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    command = [sys.executable, "test/on_gpu.py", *words, *options]
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    lines = ended.stdout.partition("\nstep ")[2].splitlines()[1:]
    return ended, {line.split()[0]: line.split()[1] for line in lines}


def test_each_step_does_its_work_or_says_what_is_missing(tmp_path):
    ended, table = make_gpu(tmp_path, *STEPS.split())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    graph = dict.fromkeys(("graph_rows_cpp", "graph_rows_python", "graph_rows_several"), "missing")
    nccl = dict.fromkeys(("nccl_one_rank", "nccl_several_ranks", "nccl_cpp"), "passed")
    builds = {name: table.pop(name) for name in list(table) if name.startswith("build_")}
    assert builds["build_library"] == builds["build_tests"] == builds["build_programs"] == "passed"
    assert table == {"unit_tests": "passed", "rank_tests_1": "passed", **nccl, **graph, "profile": "passed"}
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in (*builds, *table)}
    assert found["build_tests"]["said"] == "the kit has it"
    assert re.match(r"[1-9]\d* passed, 0 failed", found["rank_tests_1"]["said"])
    assert "needs a GPU" in found["graph_rows_cpp"]["said"] or "no CUDA kernels" in found["graph_rows_cpp"]["said"]
    assert "needs a GPU" in found["graph_rows_python"]["said"]
    for name in ("machine", "GPU", "driver", "torch", "NCCL", "commit", "date"):
        assert found["unit_tests"]["facts"][name]
    assert (tmp_path / "profile" / "step.svg").stat().st_size > 1000
