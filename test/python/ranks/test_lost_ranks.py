"""Ranks that die, come again over an old store, or do something else than the others."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import batch, mlp
from torch import nn

import shardwise
from shardwise.testing import RankFailure, run_ranks


def train(rank: int, steps: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    model = mlp(5, 7, 3)
    for layer in (model[0], model[2]):
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(batch(step, rank, 5)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def one_life(rank: int, port: int) -> torch.Tensor:
    """As torchrun starts ranks again over its agent's store."""
    if rank == 0:
        time.sleep(1)  # What the other finds meanwhile is old.
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("shardwise", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    return train(rank)[0].weight.full_tensor().detach()


def leave(rank: int, folder: Path) -> None:
    """All is well, but the process group has a collective under way that will not end."""
    (folder / str(rank)).touch()
    os._exit(0)


def a_death_before_wrapping(rank: int, folder: Path) -> None:
    dist.barrier()
    begin = time.monotonic()
    if rank == 2:
        os._exit(0)
    with pytest.raises(shardwise.PeerError, match=r"rank \d"):
        train(rank)
    assert time.monotonic() - begin < 30
    leave(rank, folder)


def wrong_call(rank: int, folder: Path, differ: Callable[[nn.Sequential], object], mine: str) -> None:
    model = train(rank)
    begin = time.monotonic()
    parts = ("rank 0 waits for the all-gather of unit", f"rank 1 waits for the program's own {mine}")
    with pytest.raises(RuntimeError, match=".*".join(map(re.escape, parts))) as caught:
        differ(model) if rank == 1 else model(batch(9, rank, 5)).sum().backward()
    assert isinstance(caught.value, dist.DistBackendError if rank == 1 else shardwise.Error)
    assert time.monotonic() - begin < 30
    leave(rank, folder)


def barrier(_: nn.Sequential) -> object:
    return dist.barrier()


def whole(model: nn.Sequential) -> object:
    return model[0].weight.full_tensor()  # type: ignore[operator]


CALLS = {"barrier": (barrier, "barrier"), "full_tensor": (whole, "all_gather")}


class TestLostRanks:
    def test_a_store_that_outlives_its_ranks(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        lives = [run_ranks(2, one_life, store.port, backend=None) for _ in range(2)]
        for weights in lives:
            assert torch.equal(weights[0], lives[0][0]) and torch.equal(weights[1], lives[0][0])

    @pytest.mark.parametrize("backend", ["gloo", "shardwise"])
    def test_a_death_before_wrapping(self, backend: str, tmp_path: Path) -> None:
        with pytest.raises(RankFailure):
            run_ranks(3, a_death_before_wrapping, tmp_path, backend=backend)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]

    @pytest.mark.parametrize("call", CALLS)
    def test_a_call_of_the_program_itself(self, call: str, tmp_path: Path) -> None:
        with pytest.raises(RankFailure):
            run_ranks(2, wrong_call, tmp_path, *CALLS[call], backend="shardwise")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
