"""A program that no launcher started is a world of one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch, shardwise
model = shardwise.{kind}(torch.nn.Linear(3, 2))
model(torch.ones(1, 3)).sum().backward()
assert model.weight.grad.full_tensor().equal(torch.ones(2, 3))
assert torch.distributed.get_world_size() == 1
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_a_program_without_a_launcher_is_alone(kind):
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(kind=kind)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
