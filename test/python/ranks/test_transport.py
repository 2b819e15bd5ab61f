"""The direct transport under torch.distributed: init_process_group, DeviceMesh, DDP, FSDP2, CommDebugMode."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from models import batch, mlp, whole
from pool import on_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import shardwise


def collectives(rank: int) -> None:
    sizes_that_differ(rank)
    world = dist.get_world_size()
    device_backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert device_backend.name() == "shardwise", device_backend.name()
    total = world * (world + 1) / 2
    for size in (3, 100_000):
        tensor = torch.full((size,), rank + 1.0)
        dist.all_reduce(tensor)
        assert (tensor == total).all()
        gathered = torch.empty(world * size)
        work = dist.all_gather_into_tensor(gathered, torch.full((size,), rank + 1.0), async_op=True)
        assert work is not None
        work.wait()
        assert work.is_completed() and work.get_future().value()[0].data_ptr() == gathered.data_ptr()
        assert torch.equal(gathered.view(world, size)[:, 0], torch.arange(1.0, world + 1))
        part = torch.empty(size)
        dist.reduce_scatter_tensor(part, gathered, op=dist.ReduceOp.AVG)
        assert (part == rank + 1).all()
        dist.broadcast(tensor, src=1)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        assert (tensor == total).all()
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, "x" * rank)
    assert objects == ["x" * each for each in range(world)]
    if rank == 0:
        dist.send(torch.ones(4), dst=1, tag=7)
    elif rank == 1:
        received = torch.zeros(4)
        dist.recv(received, src=0, tag=7)
        assert received.sum() == 4


def one_operation_each(rank: int) -> None:
    # Imports that take long stay out of the ranks of the other tests.
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = mesh.get_group()
    with CommDebugMode() as seen:
        dist.all_gather_into_tensor(torch.empty(2 * 50_000), torch.ones(50_000), group=group)
        dist.reduce_scatter_tensor(torch.empty(50_000), torch.ones(2 * 50_000), group=group)
        dist.all_reduce(torch.ones(50_000), group=group)
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(3), 2, group.group_name)
        assert torch.ops._c10d_functional.wait_tensor(gathered).sum() == 6
    assert seen.get_total_counts() == 4, seen.get_comm_counts()


def steps(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step, rank, 5)).pow(2).mean().backward()
        optimizer.step()


def torchs_own_engines(rank: int) -> None:
    """DDP and FSDP2 train over it to the same bits as over Gloo, and so does replicate()."""
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    meshes = [init_device_mesh("cpu", (world,)), DeviceMesh.from_group(gloo, "cpu")]
    source = mlp(5, 7, 3)
    trained = []
    for mesh in meshes:
        ddp = DistributedDataParallel(copy.deepcopy(source), process_group=mesh.get_group())
        steps(ddp, rank)
        fsdp = fully_shard(copy.deepcopy(source), mesh=mesh)
        steps(fsdp, rank)
        ours = shardwise.replicate(copy.deepcopy(source), mesh=mesh)
        steps(ours, rank)
        trained.append([
            {name: whole(value) for name, value in each.state_dict().items()} for each in (ddp.module, fsdp, ours)
        ])  # fmt: skip
    for mine, theirs in zip(*trained, strict=True):
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name
    torch.testing.assert_close(trained[0][2], trained[0][0])


def sizes_that_differ(rank: int) -> None:
    """An error on every rank, and all may go on."""
    mine, other = 16 * (rank == 0) + 16, "16|32"
    with pytest.raises(
        dist.DistBackendError, match=rf"rank {rank} calls an all-reduce .sum. of {mine} .* ({other}) el"
    ):
        dist.all_reduce(torch.ones(mine))


class TestTransport:
    @pytest.mark.parametrize(("world", "backend"), [(2, "cpu:shardwise"), (3, "shardwise")])
    def test_collectives(self, world: int, backend: str):
        run_ranks(world, collectives, backend=backend)

    test_one_operation_each = on_ranks(2, one_operation_each, backend="shardwise")
    test_torchs_own_engines = on_ranks(2, torchs_own_engines, backend="shardwise")
