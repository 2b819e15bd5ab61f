"""Ranks that stay from test to test: run_ranks() of shardwise.testing without starting processes each time.

For tests that leave nothing behind in a process. Others take shardwise.testing's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices

from shardwise import testing
from shardwise.testing import RankPool

# What the server of ranks has imported, no rank needs to.
testing.PRELOAD += [
    "torch._dynamo",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
]

if devices.DEVICE == "late":
    testing.PRELOAD += ["devices"]
    # Where the server finds it.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(devices.__file__).parent), os.environ.get("PYTHONPATH", "")])

_pools: dict[int, RankPool] = {}


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    if devices.DEVICE == "late":
        function = devices.Checked(function)
    options.setdefault("backend", devices.BACKEND)
    return _pools.setdefault(world_size, RankPool(world_size)).run(function, *args, **options)


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any], None]:
    """A test, for a member of a class: it runs the function on ranks."""

    def test(_: Any) -> None:
        run_ranks(world_size, function, *args, **options)

    return test
