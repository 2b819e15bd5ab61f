"""Ranks that stay from test to test: run_ranks() of shardwise.testing without starting processes each time.

For tests that leave nothing behind in a process. Others take shardwise.testing's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import devices
import pytest

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


def on_ranks(
    world_size: int | Mapping[Any, int],
    function: Callable[..., Any],
    *args: Any,
    each: Iterable[Any] | None = None,
    path: str = "",
    **options: Any,
) -> Callable[..., None]:
    """A test, for a member of a class: it runs the function on ranks.

    With `each` it is one for each of these first arguments; of those with names these are the values. There may be a
    number of ranks for each. `path`: one in a new folder, which is the last argument.
    """

    def test(_: Any, tmp_path: Path, given: Any) -> None:
        size = world_size if isinstance(world_size, int) else world_size[given]
        first = given if isinstance(given, tuple) else (given,)
        run_ranks(size, function, *first, *args, *([str(tmp_path / path)] if path else []), **options)

    if each is None:
        return lambda _, tmp_path: test(_, tmp_path, ())
    each = each if isinstance(each, Mapping) else {str(given): given for given in each}
    return pytest.mark.parametrize("given", each.values(), ids=each.keys())(test)
