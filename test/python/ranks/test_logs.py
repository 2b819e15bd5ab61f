"""What TORCH_LOGS="+shardwise" shows of forwards and backwards; without it there is nothing."""

from __future__ import annotations

import re

from checkout import python

PROGRAM = """
import torch, shardwise
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for wrap in (shardwise.fully_shard, shardwise.replicate):
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    for layer in (model[0], model[2]):
        wrap(layer)
    wrap(model)
    for _ in range(2):
        model(torch.ones(4, 2)).sum().backward()
    with torch.no_grad():
        model(torch.ones(4, 2))
    print("HOOKS", sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()))
    print(repr(shardwise.plan(model)) == str(shardwise.plan(model)), "Sequential(" in repr(model))
dist.destroy_process_group()
"""

FORWARD = [
    "root_pre_forward",
    "pre_forward",
    "pre_forward (0)",
    "post_forward (0)",
    "pre_forward (2)",
    "post_forward (2)",
    "post_forward",
]
#: The inputs of the root and of the first layer need no gradients: they end with the backward.
BACKWARD = [
    "pre_backward (2)",
    "pre_backward",
    "post_backward (2)",
    "pre_backward (0)",
    "post_backward",
    "post_backward (0)",
    "root_post_backward",
]


def run(**variables: str) -> tuple[list[str], str]:
    """The events that were logged, and what the program printed."""
    done = python("-c", PROGRAM, **variables)
    assert done.returncode == 0, done.stderr
    return re.findall(r"FSDP::(.+)$", done.stderr, re.MULTILINE), done.stdout


class TestLogs:
    def test_events_are_shown(self) -> None:
        events, _ = run(TORCH_LOGS="+shardwise")
        assert events == 2 * ((FORWARD + BACKWARD) * 2 + FORWARD)

    def test_nothing_is_there_without_it(self) -> None:
        events, printed = run()
        assert not events
        assert printed.count("True True\n") == 2
        # One before and one after each module that was wrapped.
        assert printed.count("HOOKS 6\n") == 2
