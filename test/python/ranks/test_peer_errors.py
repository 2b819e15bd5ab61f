"""Errors that come out of backward() are of the classes that the package names."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from models import batch, mlp
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise.testing import run_ranks


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> None:
    for layer in (model[0], model[2]):
        shardwise.fully_shard(layer, mesh=mesh)
    shardwise.fully_shard(model, mesh=mesh)


def kept(model: nn.Sequential, mesh: DeviceMesh) -> None:
    shardwise.fully_shard(model, mesh=mesh, reshard_after_forward=False)


def replicated(model: nn.Sequential, mesh: DeviceMesh) -> None:
    shardwise.replicate(model, mesh=mesh)


WRAPS = {"fully_shard": sharded, "kept": kept, "replicate": replicated}


def mesh_with_little_time() -> DeviceMesh:
    group = dist.new_group(timeout=timedelta(seconds=2))
    return DeviceMesh.from_group(group, "cpu")


def alone_in_backward(rank: int, wrap: Callable[..., None]) -> None:
    model = mlp(5, 7, 3)
    wrap(model, mesh_with_little_time())
    for step in range(2):
        model(batch(step, rank, 5)).pow(2).mean().backward()
    loss = model(batch(2, rank, 5)).pow(2).mean()
    if rank == 0:
        with pytest.raises(shardwise.PeerError, match="rank 0") as caught:
            loss.backward()
        assert type(caught.value) is shardwise.PeerError
        assert isinstance(caught.value, RuntimeError)
    # Not by a barrier: the agreement would see that one, and both ranks get its error.
    store = distributed_c10d._get_default_store()
    store.set("rank 0 is done", "1") if rank == 0 else store.get("rank 0 is done")


def different_ways_in_backward(rank: int) -> None:
    model = mlp(5, 7, 3)
    sharded(model, mesh_with_little_time())
    for step in range(2):
        model(batch(step, rank, 5)).pow(2).mean().backward()
    hidden = model[0](batch(2, rank, 5))
    with pytest.raises(shardwise.Error, match="do not run the same units in the same order") as caught:
        # Of rank 1 the first gather of this backward is another unit's.
        (hidden.pow(2).mean() if rank == 0 else model[2](hidden.detach()).pow(2).mean()).backward()
    assert type(caught.value) is shardwise.Error


class TestPeerErrors:
    @pytest.mark.parametrize("backend", ["gloo", "shardwise"])
    @pytest.mark.parametrize("wrap", WRAPS)
    def test_keep_their_class_through_backward(self, wrap: str, backend: str) -> None:
        run_ranks(2, alone_in_backward, WRAPS[wrap], backend=backend)

    def test_those_of_the_agreement_too(self) -> None:
        run_ranks(2, different_ways_in_backward)
