"""The rows of fully_shard_training and replicate_training about other methods, several roots, a world of one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from engine import TORCH, Engine, ours
from models import batch
from parity import Parity, Program, Wrap, adam, assert_same_bits, counting
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training_models import WIDTHS, mlp_program, mlps


class Features(nn.Module):
    """Its forward calls another method, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = mlps(6, 2), nn.Linear(6, 5)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.forward_features(x))


def another_method(rank: int, function: str) -> None:
    """Two times in three it alone is called, which leaves the head unused."""

    def wrapping(**options: Any) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            for block in model.blocks:
                getattr(engine, function)(block, **options)
            # The root's forward calls the method and goes on: the parameters must be there still.
            root = {"reshard_after_forward": False} if options.get("reshard_after_forward") else {}
            getattr(engine, function)(model, **root)
            engine.register_fsdp_forward_method(model, "forward_features")

        return wrap

    def loss(model: Any, number: int, data_rank: int) -> torch.Tensor:
        x = batch(number, data_rank, 6)
        return (model(x) if number % 3 == 2 else model.forward_features(x)).pow(2).sum()

    parity = Parity(Program(Features, loss))
    for options in [{"reshard_after_forward": each} for each in (True, None)] if function == "fully_shard" else [{}]:
        parity.both(wrapping(**options))
    # Of a module that is no unit nothing is asked.
    ours().register_fsdp_forward_method(nn.Linear(2, 2), "no_such_method")


class Three(nn.Module):
    """Three models, one after another; none is inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlps(6, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def several_roots(rank: int) -> None:
    def wrapping(shared: bool) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            for part in model.parts:
                for mlp in part:
                    engine.fully_shard(mlp)
                engine.fully_shard(part)
                part._get_fsdp_state()._lazy_init()
            units = [unit for part in model.parts for unit in (part, *part)]
            if shared:
                engine.share_comm_ctx(units)
            # Otherwise the units of a root have the root's.
            assert len({id(unit._get_fsdp_state()._comm_ctx) for unit in units}) == (1 if shared else 3)

        return wrap

    def loss(model: Any, number: int, data_rank: int) -> torch.Tensor:
        return model(batch(number, data_rank, 6)).pow(2).sum()

    parity = Parity(Program(Three, loss))
    for shared in (True, False):
        parity.both(wrapping(shared))
    ours().share_comm_ctx([])


def alone(rank: int) -> None:
    assert dist.get_world_size() == 1
    for widths in WIDTHS:
        parity = Parity(mlp_program(widths, optimizer=adam))
        for reshard in (True, None):

            def wrap(engine: Engine, model: Any, reshard: Any = reshard) -> None:
                counts: dict[str, int] = {}
                with counting(counts, "debug"):
                    engine.fully_shard(model[0], reshard_after_forward=reshard)
                    engine.fully_shard(model, reshard_after_forward=reshard)
                assert counts == {}, counts

            traces = [parity.run(engine, wrap, counted=True) for engine in (TORCH, ours())]
            assert_same_bits(*traces)
            for trace in traces:
                assert [step.counts for step in trace.steps] == [{}] * parity.program.steps


def below_a_replicated_model(rank: int) -> None:
    """There the outermost sharded modules are roots: told nothing, they keep their parameters after forward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for reshard, kept in ((None, {"outer"}), (True, set()), (False, {"outer", "inner"})):
        for engine in (TORCH, ours()):
            torch.manual_seed(7)
            outer = nn.Sequential(OrderedDict(inner=nn.Linear(4, 4), tail=nn.Linear(4, 4)))
            model: Any = nn.Sequential(OrderedDict(outer=outer, head=nn.Linear(4, 4)))
            engine.fully_shard(outer.inner, mesh=mesh, reshard_after_forward=reshard)
            engine.fully_shard(outer, mesh=mesh, reshard_after_forward=reshard)
            engine.replicate(model, mesh=mesh)
            weights = {"outer": "outer.tail.weight", "inner": "outer.inner.weight"}
            for _ in range(2):
                loss = model(batch(0, rank, 4)).sum()
                found = {n for n, path in weights.items() if not isinstance(model.get_parameter(path), DTensor)}
                assert found == kept, f"{engine.name}, {reshard}: {found}"
                loss.backward()
                assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


class TestFullyShardCustomForwardMethod:
    test_register_fsdp_forward_method = on_ranks(2, another_method, "fully_shard")


class TestReplicateCustomForwardMethod:
    test_register_fsdp_forward_method = on_ranks(2, another_method, "replicate")


class TestFullyShardShareCommContext:
    test_share_comm_context = on_ranks(2, several_roots)


class TestFullyShardBelowReplicate:
    test_the_outermost_keep_their_parameters = on_ranks(2, below_a_replicated_model)


class TestFullyShardWorldSize1:
    test_train_parity_single_worldsize1 = on_ranks(1, alone)
