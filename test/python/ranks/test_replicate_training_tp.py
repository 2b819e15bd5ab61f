"""The row of replicate_training beside tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from engine import Engine
from form import by_form
from parity import Parity
from pool import run_ranks
from tensor_parallel import WIDTHS, assert_on, on_mesh, stack_program
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard


def beside_tensor_parallelism(rank: int) -> None:
    names = ("dp_replicate", "tp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)

    def wrap(engine: Engine, module: Any) -> None:
        engine.replicate(module, mesh=mesh["dp_replicate"])

    for width in WIDTHS:
        # Ranks of one row of the mesh share the data.
        parity = Parity(stack_program(width, steps=by_form(3, 10)), rank=mesh["dp_replicate"].get_local_rank(), ranks=2)
        for checkpointed in (False, True):
            mine = parity.both(on_mesh(mesh["tp"], checkpointed, wrap))
            assert_on(mesh, names, mine.model, parity.expected[-1].values)
            first = mine.model[0]
            assert first.in_proj.weight.placements == (Replicate(), Shard(0))
            assert first.out_proj.weight.placements == (Replicate(), Shard(1))
            assert first.out_proj.bias.placements == (Replicate(), Replicate())
    assert torch.equal(mesh.mesh, torch.arange(4).view(2, 2))


class TestReplicateTPTraining:
    def test_replicate_tp(self) -> None:
        run_ranks(4, beside_tensor_parallelism, timeout=300)
