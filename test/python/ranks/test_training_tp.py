"""The rows of fully_shard_training and replicate_training beside tensor parallelism."""

from __future__ import annotations

from typing import Any

from engine import Engine
from form import by_form
from parity import Parity, Wrapping
from pool import run_ranks
from tensor_parallel import WIDTHS, assert_on, on_mesh, stack_program
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def wrapped_on(data: DeviceMesh, tensor: DeviceMesh, function: str, checkpointed: bool, **options: Any) -> Wrapping:
    def wrap(engine: Engine, module: Any) -> None:
        getattr(engine, function)(module, mesh=data, **options)

    return on_mesh(tensor, checkpointed, wrap)


def two_dimensions(rank: int) -> None:
    """Inside of three, of which the first is a pipeline's of one stage."""
    whole = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    data, tensor, both = whole["dp"], whole["tp"], whole["dp", "tp"]
    for width in WIDTHS:
        parity = Parity(stack_program(width, steps=4), rank=data.get_local_rank(), ranks=2)
        for reshard, checkpointed in by_form([(True, width == 3)], [(True, False), (False, False), (True, True)]):
            mine = parity.both(wrapped_on(data, tensor, "fully_shard", checkpointed, reshard_after_forward=reshard))
            assert_on(both, ("dp", "tp"), mine.model, parity.expected[-1].values)
            first = mine.model[0]
            # Cut first by the tensor parallel dimension, then each piece by the other.
            assert first.in_proj.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
            assert first.out_proj.weight.placements == (Shard(0), Shard(1))
            assert first.out_proj.bias.placements == (Shard(0), Replicate())


def three_dimensions(rank: int) -> None:
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    data = mesh["dp_replicate", "dp_shard"]
    data_rank = 2 * mesh["dp_replicate"].get_local_rank() + mesh["dp_shard"].get_local_rank()
    for width, checkpointed, reshard in by_form(
        [(17, True, True)], [(3, False, True), (16, True, False), (17, True, True)]
    ):
        parity = Parity(stack_program(width, steps=4), rank=data_rank, ranks=4)
        mine = parity.both(wrapped_on(data, mesh["tp"], "fully_shard", checkpointed, reshard_after_forward=reshard))
        assert_on(mesh, names, mine.model, parity.expected[-1].values)
        first = mine.model[0]
        assert first.in_proj.weight.placements == (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
        assert first.out_proj.weight.placements == (Replicate(), Shard(0), Shard(1))


def copies(rank: int) -> None:
    names = ("dp_replicate", "tp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for width in WIDTHS:
        # Ranks of one row of the mesh share the data.
        parity = Parity(stack_program(width, steps=3), rank=mesh["dp_replicate"].get_local_rank(), ranks=2)
        mine = parity.both(wrapped_on(mesh["dp_replicate"], mesh["tp"], "replicate", checkpointed=width == 3))
        assert_on(mesh, names, mine.model, parity.expected[-1].values)
        first = mine.model[0]
        assert first.in_proj.weight.placements == (Replicate(), Shard(0))
        assert first.out_proj.weight.placements == (Replicate(), Shard(1))
        assert first.out_proj.bias.placements == (Replicate(), Replicate())


class TestFullyShardNDTraining:
    def test_2d_mlp_with_nd_mesh(self) -> None:
        run_ranks(4, two_dimensions, timeout=300)


class TestFullyShardHSDP3DTraining:
    def test_3d_mlp_with_nd_mesh(self) -> None:
        run_ranks(8, three_dimensions, timeout=300)


class TestReplicateTPTraining:
    def test_replicate_tp(self) -> None:
        run_ranks(4, copies, timeout=300)
