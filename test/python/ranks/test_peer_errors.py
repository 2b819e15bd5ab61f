"""Errors that come out of backward() are of the classes that the package names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import bound
import pytest
import torch.distributed as dist
from models import batch, mlp
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise.testing import run_ranks


def mesh_with_little_time() -> DeviceMesh:
    group = dist.new_group(timeout=timedelta(seconds=6))
    return DeviceMesh.from_group(group, "cpu")


def wrapped(kind: str) -> Any:
    model, mesh = mlp(5, 7, 3), mesh_with_little_time()
    for module in (model[0], model[2], model) if kind == "fully_shard" else (model,):
        getattr(shardwise, kind)(module, mesh=mesh)
    return model


def begun(rank: int, kind: str) -> Any:
    model = wrapped(kind)
    for step in range(2):
        model(batch(step, rank, 5)).pow(2).mean().backward()
    return model


def alone_in_backward(rank: int, kind: str) -> None:
    model = begun(rank, kind)
    loss = model(batch(2, rank, 5)).pow(2).mean()
    if rank == 0:
        # What a program for torch alone catches.
        with pytest.raises(dist.DistError, match="rank 0") as caught:
            loss.backward()
        assert type(caught.value) is shardwise.PeerError
        assert isinstance(caught.value, shardwise.Error) and isinstance(caught.value, RuntimeError)
    # Not by a barrier: the agreement would see that one, and both ranks get its error.
    store = distributed_c10d._get_default_store()
    store.set("rank 0 is done", "1") if rank == 0 else store.get("rank 0 is done")


def different_ways_in_backward(rank: int) -> None:
    model = begun(rank, "fully_shard")
    hidden = model[0](batch(2, rank, 5))
    with pytest.raises(shardwise.Error, match="do not run the same units in the same order") as caught:
        # Of rank 1 the first gather of this backward is another unit's.
        (hidden.pow(2).mean() if rank == 0 else model[2](hidden.detach()).pow(2).mean()).backward()
    assert type(caught.value) is shardwise.Error


def of_models_in_cpp(rank: int, name: str, in_backward: bool) -> None:
    mesh = mesh_with_little_time()
    model: Any = getattr(bound.models(), name)(*bound_sizes[name])
    inner = [model.layer(1)] if name == "Again" else []
    for module in (*inner, model):
        shardwise.fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # Until every step follows one that was there before, so that nothing is compared.
    for step in range(4):
        model(batch(step, rank, 5)).pow(2).mean().backward()
    loss = model(batch(4, rank, 5)).pow(2).mean() if in_backward else None
    if rank == 0:
        with pytest.raises(shardwise.PeerError, match="rank 0") as caught:
            loss.backward() if loss is not None else model(batch(4, rank, 5))
        assert type(caught.value) is shardwise.PeerError
    dist.barrier()


def of_methods_in_cpp(rank: int) -> None:
    """The extension module that has the method knows nothing of shardwise in Python."""
    block = bound.models().Stack(6, 1, False).block(0)
    shardwise.fully_shard(block, mesh=mesh_with_little_time())
    for step in range(4):
        block.reversed(batch(step, rank, 6)).pow(2).mean().backward()
    if rank == 0:
        with pytest.raises(shardwise.PeerError, match="rank 0") as caught:
            block.reversed(batch(4, rank, 6))
        assert type(caught.value) is shardwise.PeerError
    dist.barrier()
    with pytest.raises(ValueError, match="size 0; it must be 1 or more") as wrong:
        bound.models().make_mesh(dist.HashStore(), 0, [("shards", 0)])
    assert isinstance(wrong.value, shardwise.Error)


bound_sizes = {"Chain": (5, 2), "Again": (5,)}


def of_users_own(rank: int, kind: str) -> None:
    """What a program's own hooks raise in a backward comes out as it is."""
    model = wrapped(kind)
    calls = 0

    def fail(_: Any) -> None:
        nonlocal calls
        calls += 1
        raise KeyError("mine")

    with_parameters = model[2] if isinstance(model[2], shardwise.FSDPModule) else model
    with_parameters.set_all_reduce_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(batch(0, rank, 5)).pow(2).mean().backward()
    with_parameters.set_all_reduce_hook(None)
    handle = next(model.parameters()).register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(batch(0, rank, 5)).pow(2).mean().backward()
    assert calls == 2
    handle.remove()
    model(batch(0, rank, 5)).pow(2).mean().backward()


class TestPeerErrors:
    @pytest.mark.parametrize(("name", "in_backward"), [("Chain", False), ("Again", True)])
    def test_of_models_in_cpp(self, name: str, in_backward: bool) -> None:
        run_ranks(2, of_models_in_cpp, name, in_backward)

    def test_of_methods_in_cpp(self) -> None:
        run_ranks(2, of_methods_in_cpp)

    @pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
    def test_those_of_the_program_are_its_own(self, kind: str) -> None:
        run_ranks(2, of_users_own, kind)

    @pytest.mark.parametrize(("kind", "backend"), [("fully_shard", "shardwise"), ("replicate", "gloo")])
    def test_keep_their_class_through_backward(self, kind: str, backend: str) -> None:
        run_ranks(2, alone_in_backward, kind, backend=backend)

    def test_those_of_the_agreement_too(self) -> None:
        run_ranks(2, different_ways_in_backward)
