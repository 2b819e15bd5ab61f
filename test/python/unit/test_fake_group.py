"""Units over torch's fake process group, which tools use to look at one rank of many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[3] / "python"

PROGRAM = """
import torch, torch.distributed as dist, shardwise
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
shardwise.replicate(model[1])
shardwise.fully_shard(model[0])
model[0](torch.ones(2, 4)).sum().backward()
print(model[0].weight.to_local().shape, model[0].weight.grad.to_local().shape)
"""


def test_a_rank_of_a_fake_process_group() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(PYTHON)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "torch.Size([2, 4]) torch.Size([2, 4])\n"
