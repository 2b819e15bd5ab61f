"""The rows of fully_shard_training and replicate_training beside tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from engine import Engine
from parity import Parity
from pool import run_ranks
from tensor_parallel import WIDTHS, assert_on, on_mesh, stack_program
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def trained(
    rank: int, whole: dict[str, int], names: tuple[str, ...], function: str, placements: list[tuple[Placement, ...]]
) -> None:
    """On these axes of a mesh. Ranks along the last one share the data. Placements: of in_proj's weight, and of
    out_proj's weight and bias."""
    mesh = init_device_mesh("cpu", tuple(whole.values()), mesh_dim_names=tuple(whole))[names]

    def wrap(engine: Engine, module: Any) -> None:
        getattr(engine, function)(module, mesh=mesh[names[:-1]])

    for width in WIDTHS:
        parity = Parity(stack_program(width, steps=4), rank=rank // 2, ranks=dist.get_world_size() // 2)
        mine = parity.both(on_mesh(mesh["tp"], width == WIDTHS[0], wrap))
        assert_on(mesh, names, mine.model, parity.expected[-1].values)
        first = mine.model[0]
        shown = [p.placements for p in (first.in_proj.weight, first.out_proj.weight, first.out_proj.bias)]
        assert shown == placements


#: Cut first by the tensor parallel dimension, then each piece by the other.
CUT = (_StridedShard(0, split_factor=2), Shard(0))
SHARDS = [CUT, (Shard(0), Shard(1)), (Shard(0), Replicate())]


class TestFullyShardNDTraining:
    def test_2d_mlp_with_nd_mesh(self) -> None:
        """Inside of three, of which the first is a pipeline's of one stage."""
        run_ranks(4, trained, {"pp": 1, "dp": 2, "tp": 2}, ("dp", "tp"), "fully_shard", SHARDS)


class TestFullyShardHSDP3DTraining:
    def test_3d_mlp_with_nd_mesh(self) -> None:
        names = ("dp_replicate", "dp_shard", "tp")
        placements = [(Replicate(), *each) for each in SHARDS]
        run_ranks(8, trained, dict.fromkeys(names, 2), names, "fully_shard", placements)


class TestReplicateTPTraining:
    def test_replicate_tp(self) -> None:
        names = ("dp_replicate", "tp")
        placements = [(Replicate(), each) for each in (Shard(0), Shard(1), Replicate())]
        run_ranks(4, trained, dict.fromkeys(names, 2), names, "replicate", placements)
