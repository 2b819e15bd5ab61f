"""The rows of fully_shard_training and replicate_training about what programs see: inputs, parameters, casts."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from engine import TORCH, Engine, ours
from models import batch, local
from parity import Parity, Program, adam, by_child, kind
from pool import on_ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from training_models import SETTINGS, batch_for, mlps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class NestedInputs(nn.Module):
    """Without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, more: tuple[Any, ...], *, factor: int, last: dict[str, Any]) -> Any:
        self.seen = [x, more[0], more[1][0], last["z"]]
        return {"total": sum(self.seen[1:], x) * factor, "more": (x,)}


def inputs_of(step: int, rank: int) -> list[torch.Tensor]:
    return [batch(10 * step + i, rank, 3).requires_grad_() for i in range(4)]


def call(model: nn.Module, x: list[torch.Tensor]) -> torch.Tensor:
    return model(x[0], (x[1], [x[2], "text"]), factor=2, last={"z": x[3]})["total"]


def inputs_come_through(rank: int, function: str) -> None:
    """On a CPU as they are; where the device is another, on it. Gradients come through to the caller's own."""
    model: Any = NestedInputs()
    getattr(ours(), function)(model)
    assert isinstance(model, ours().FSDPModule)
    model.to(DEVICE)
    for step in range(3):
        x = inputs_of(step, rank)
        total = call(model, x)
        assert [seen.device.type for seen in model.seen] == [DEVICE] * 4
        if DEVICE == "cpu":
            assert all(seen is one for seen, one in zip(model.seen, x, strict=True))
        assert torch.equal(total.cpu(), (x[0] + x[1] + x[2] + x[3]) * 2)
        total.sum().backward()
        assert all(torch.equal(one.grad, torch.full_like(one, 2)) for one in x)  # type: ignore[arg-type]
    casts = [cast_by_the_unit(engine, function, rank) for engine in (ours(), TORCH)]
    assert casts[0] == casts[1] == ([torch.bfloat16] * 4, torch.float64), casts


def cast_by_the_unit(engine: Engine, function: str, rank: int) -> tuple[list[torch.dtype], torch.dtype]:
    """The hooks of a unit without parameters run: they cast what comes in and what goes out."""
    model = NestedInputs()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    getattr(engine, function)(model, mp_policy=policy)
    x = inputs_of(0, rank)
    total = call(model, x)
    total.sum().backward()
    assert all(one.grad is not None and one.grad.dtype == one.dtype for one in x)
    return [seen.dtype for seen in model.seen], total.dtype


class NoInputs(nn.Module):
    """A forward without arguments; its data is a plain member."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.data = torch.zeros(4, 4)

    def forward(self) -> torch.Tensor:
        return torch.tanh(self.data @ self.weight) @ self.weight


def no_inputs(rank: int) -> None:
    def loss(model: Any, number: int, data_rank: int) -> torch.Tensor:
        model.data = batch(number, data_rank, 4, rows=4).to(model.weight.device)
        output = model()
        assert output.shape == (4, 4)
        return output.pow(2).sum()

    Parity(Program(NoInputs, loss, steps=4)).both(lambda engine, model: engine.fully_shard(model))


def two_mlps(engine: Engine, function: str, several: bool, **options: Any) -> tuple[Any, list[Any]]:
    """A model and its units: the first MLP's layers, and the rest, or all of it."""
    model: Any = mlps(3, 2)
    units = [*([model[0].in_proj, model[0].out_proj] if several else []), model]
    for module in units:
        assert getattr(engine, function)(module, **options) is module
        assert isinstance(module, engine.FSDPModule)
        assert isinstance(module, engine.ReplicateModule) == (function == "replicate")
    return model, units


def look(model: nn.Module) -> dict[str, Any]:
    """What a program sees of parameters: of a DTensor all it says, of a tensor that it is one; values and gradients."""
    return {
        name: (
            kind(p) if isinstance(p, DTensor) else (type(p), tuple(p.shape), p.dtype, p.requires_grad),
            local(p).tolist(),
            None if p.grad is None else (kind(p.grad), local(p.grad).tolist()),
        )
        for name, p in model.named_parameters()
    }


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step, dist.get_rank(), 3)).pow(2).sum()


def registered(rank: int, function: str, runs_backward: bool) -> None:
    """Engines swap sharded parameters and full ones; what is sharded again is what it was at wrapping."""
    for options, several in product(SETTINGS[function], (False, True)):
        seen = []
        for engine in (TORCH, ours()):
            model, units = two_mlps(engine, function, several, **options)
            sharded = list(model.parameters())
            looks = [look(model)]
            for step in range(2):
                loss = loss_of(model, step)
                looks.append(look(model))
                if runs_backward:
                    loss.backward()
                else:
                    for unit in units:
                        unit.reshard()
                assert all(a is b for a, b in zip(model.parameters(), sharded, strict=True))
                assert model[0].in_proj.weight is sharded[0]
                looks.append(look(model))
            seen.append(looks)
        assert seen[0] == seen[1], f"{options}, several {several}"


def held_in_pairs(rank: int) -> None:
    """What two ranks hold together is out of sight in ours, which shows the usual shards after a forward."""
    for engine in (TORCH, ours()):
        model, units = two_mlps(engine, "fully_shard", True, reshard_after_forward=2)
        before = look(model)
        loss_of(model, 0)
        if engine.name == "torch":
            assert all(p.device_mesh.mesh.tolist() == [[0, 1], [2, 3]] for p in model.parameters())
        else:
            assert look(model) == before
        for unit in units:
            unit.reshard()
        assert look(model) == before


def to_float64(rank: int, swap: bool, function: str) -> None:
    """After a cast of the wrapped model; `swap` is how torch lets a cast change a parameter."""

    def wrap_and_cast(engine: Engine, model: Any) -> None:
        by_child(function)(engine, model)
        before = list(model.parameters())
        assert model.to(torch.float64) is model
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert all(p.dtype == torch.float64 for p in before)

    def loss(model: nn.Module, number: int, data_rank: int) -> torch.Tensor:
        return model(batch_for(model, number, data_rank, 4)).pow(2).sum()

    torch.__future__.set_swap_module_params_on_conversion(swap)
    mine = Parity(Program(lambda: mlps(4, 2), loss, optimizer=adam), dtype=torch.float64).both(wrap_and_cast)
    gradients = [p.grad for p in mine.model.parameters()]
    assert all(g.dtype == g.to_local().dtype == g._spec.tensor_meta.dtype == torch.float64 for g in gradients)


class TestFullyShardForwardInputs:
    test_root_move_forward_input_to_device = on_ranks(2, inputs_come_through, "fully_shard")
    test_root_no_forward_inputs = on_ranks(2, no_inputs)


class TestFullyShardRegisteredParams:
    def test_param_registration_after_forward(self) -> None:
        run_ranks(2, registered, "fully_shard", False)
        run_ranks(4, held_in_pairs)

    test_param_registration_after_backward = on_ranks(2, registered, "fully_shard", True)


class TestFullyShardCastAfterInit:
    test_to_float64_after_init = on_ranks(2, to_float64, "fully_shard", each=[True, False])


class TestReplicateForwardInputs:
    test_root_move_forward_input_to_device = on_ranks(2, inputs_come_through, "replicate")


class TestReplicateRegisteredParams:
    test_param_registration_after_forward = on_ranks(2, registered, "replicate", False)
    test_param_registration_after_backward = on_ranks(2, registered, "replicate", True)


class TestReplicateCastAfterInit:
    test_to_float64_after_init = on_ranks(2, to_float64, "replicate", each=[True, False])
