"""The rows of fully_shard_training and replicate_training about what programs see: inputs, parameters, casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import TORCH, Engine, ours
from models import batch, reference_backward
from parity import Parity, Pieces, Program, adam, assert_pieces, by_child, kind
from pool import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from training_models import batch_for, mlps

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


class TwoMlps:
    """What a program sees of the parameters of two MLPs, as an engine swaps a sharded form and a full one. The first
    one's layers, and the rest, are units, or all of it is one."""

    def __init__(self, engine: Engine, function: str, width: int, several: bool, **options: Any) -> None:
        self.model: Any = mlps(width, 2)
        self.reference: Any = mlps(width, 2)
        self.width = width
        self.names = [name for name, _ in self.model.named_parameters()]
        self.inner = [self.model[0].in_proj, self.model[0].out_proj] if several else []
        for module in [*self.inner, self.model]:
            assert getattr(engine, function)(module, **options) is module
            assert isinstance(module, engine.FSDPModule)
            assert isinstance(module, engine.ReplicateModule) == (function == "replicate")
        self.sharded: dict[str, Any] = dict(self.model.named_parameters())
        if function == "replicate":
            assert all(p.placements == (Replicate(),) for p in self.sharded.values())
            assert {p.device_mesh.mesh_dim_names for p in self.sharded.values()} == {("replicate",)}
        self.pieces = Pieces()

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(batch(step, rank, self.width)).pow(2).sum()

    def forward(self, step: int) -> torch.Tensor:
        loss = self.loss(self.model, step, dist.get_rank())
        torch.testing.assert_close(loss, self.loss(self.reference, step, dist.get_rank()))
        return loss

    def backward(self, step: int) -> None:
        self.forward(step).backward()
        reference_backward(dist.get_world_size(), lambda r: self.loss(self.reference, step, r))

    def reshard(self) -> None:
        for unit in [*self.inner, self.model]:
            unit.reshard()

    def look(self) -> dict[str, Any]:
        """What each parameter is at the moment: of a DTensor all it says, of a tensor that it is one."""
        return {
            name: kind(p) if isinstance(p, DTensor) else (type(p), tuple(p.shape), p.dtype, p.requires_grad)
            for name, p in self.model.named_parameters()
        }

    def assert_sharded(self) -> None:
        """Each is the very DTensor that it was when the model was wrapped, with this rank's piece."""
        parameters = dict(self.model.named_parameters())
        assert list(parameters) == self.names
        for name, parameter in parameters.items():
            assert parameter is self.sharded[name], name
            assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor), f"{name}: {type(parameter)}"
        assert_pieces("sharded", parameters, dict(self.reference.named_parameters()), self.pieces)

    def assert_gradients(self) -> None:
        """Also of the members of modules, which are the same parameters."""
        assert self.model[0].in_proj.weight is dict(self.model.named_parameters())["0.in_proj.weight"]
        theirs = {name: p.grad for name, p in self.reference.named_parameters()}
        mine = {name: p.grad for name, p in self.model.named_parameters()}
        assert all(gradient is not None for gradient in theirs.values())
        assert_pieces("the gradient", mine, theirs, Pieces())
        for name, gradient in mine.items():
            assert kind(gradient) == kind(self.sharded[name]), name

    def assert_full(self, inner: bool, root: bool) -> None:
        """Full are those of the inner units, of the root, of both or of neither; all have the reference's values."""
        for (name, mine), theirs in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            full = inner if self.inner and name.startswith("0.") else root
            assert isinstance(mine, nn.Parameter), name
            assert isinstance(mine, DTensor) != full, f"{name}: {type(mine)}, full: {full}"
            wanted = self.pieces.of(theirs, mine) if isinstance(mine, DTensor) else theirs
            assert torch.equal(mine.to_local() if isinstance(mine, DTensor) else mine, wanted), name


#: What can be said of resharding, and whether the inner units and the root are full after a forward.
SETTINGS: dict[str, list[tuple[dict[str, Any], bool, bool]]] = {
    # Unset: the outermost unit keeps its full copies.
    "fully_shard": [
        ({"reshard_after_forward": reshard}, reshard is False, reshard in (False, None))
        for reshard in (True, False, 2, None)
    ],
    "replicate": [({}, True, True)],
}


def registered_after_forward(rank: int, function: str) -> None:
    for options, inner, root in SETTINGS[function]:
        in_pairs = options.get("reshard_after_forward") == 2
        for several in (False, True):
            seen = []
            for engine in (TORCH, ours()):
                both = TwoMlps(engine, function, 3, several, **options)
                both.assert_sharded()
                looks = [both.look()]
                for step in range(2):
                    both.forward(step)
                    both.assert_full(inner, root)
                    # Ours shows the shards; what two ranks hold together is out of sight.
                    if in_pairs and engine.name == "torch":
                        assert all(p.device_mesh.mesh.tolist() == [[0, 1], [2, 3]] for p in both.model.parameters())
                    if not in_pairs:
                        looks.append(both.look())
                    both.reshard()
                    both.assert_sharded()
                    looks.append(both.look())
                seen.append(looks)
            assert seen[0] == seen[1], f"{options}, several {several}"


def registered_after_backward(rank: int, function: str) -> None:
    """The sharded ones, with gradients, and torch's look the same."""
    for options, _, _ in SETTINGS[function]:
        for several in (False, True):
            seen = []
            for engine in (TORCH, ours()):
                both = TwoMlps(engine, function, 8, several, **options)
                for step in range(2):
                    both.assert_sharded()
                    both.backward(step)
                    both.assert_sharded()
                    both.assert_gradients()
                seen.append(both.look())
            assert seen[0] == seen[1], f"{options}, several {several}"


def to_float64(rank: int, function: str, swap: bool) -> None:
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
    def test_root_move_forward_input_to_device(self) -> None:
        run_ranks(2, inputs_come_through, "fully_shard")

    def test_root_no_forward_inputs(self) -> None:
        run_ranks(2, no_inputs)


class TestFullyShardRegisteredParams:
    def test_param_registration_after_forward(self) -> None:
        run_ranks(4, registered_after_forward, "fully_shard")

    def test_param_registration_after_backward(self) -> None:
        run_ranks(4, registered_after_backward, "fully_shard")


class TestFullyShardCastAfterInit:
    @pytest.mark.parametrize("swap", [True, False])
    def test_to_float64_after_init(self, swap: bool) -> None:
        run_ranks(2, to_float64, "fully_shard", swap)


class TestReplicateForwardInputs:
    def test_root_move_forward_input_to_device(self) -> None:
        run_ranks(2, inputs_come_through, "replicate")


class TestReplicateRegisteredParams:
    def test_param_registration_after_forward(self) -> None:
        run_ranks(2, registered_after_forward, "replicate")

    def test_param_registration_after_backward(self) -> None:
        run_ranks(2, registered_after_backward, "replicate")


class TestReplicateCastAfterInit:
    @pytest.mark.parametrize("swap", [True, False])
    def test_to_float64_after_init(self, swap: bool) -> None:
        run_ranks(2, to_float64, "replicate", swap)
