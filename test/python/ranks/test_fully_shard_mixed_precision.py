"""Rows about dtypes: norms in low precision, parameters that keep their dtype, units with parameters of several."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from bound import models as bound_models
from engine import TORCH, Engine, ours
from models import batch, local, rounded_backward, step_all
from parity import Program, Wrapping, assert_same_bits, train
from pool import on_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise
from shardwise import MixedPrecisionPolicy
from shardwise._state import unit_of

LOW = torch.bfloat16
HAS_OVERRIDES = "param_dtype_override_fn" in torch.distributed.fsdp.MixedPrecisionPolicy.__dataclass_fields__
#: Since 2.15 torch sums in the parameters' own dtypes.
SUMS_IN_OWN_DTYPE = hasattr(FSDPParam, "unsharded_grad_dtype")


class Normed(nn.Module):
    """Norms between layers; what they got is kept."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = norm(8)
        self.last = nn.Linear(8, 4)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.seen = hidden.dtype
        out: torch.Tensor = self.last(torch.tanh(self.norm(hidden)))
        return out


def normed(norm: Callable[[int], nn.Module] = nn.LayerNorm, kind: type[Normed] = Normed) -> Normed:
    torch.manual_seed(5)
    return kind(norm)


def wrap(engine: Engine, model: Normed, **options: Any) -> Any:
    for part in (model.first, model.norm, model.last, model):
        engine.fully_shard(part, **options)
    return model


def norms(rank: int, low: torch.dtype) -> None:
    """Forward and backward in a low precision, with buffers in their own, as torch's engine does it."""
    wrapping = Wrapping(lambda engine, model: wrap(engine, model, mp_policy=MixedPrecisionPolicy(param_dtype=low)))

    def loss(model: Any, step: int, rank: int) -> torch.Tensor:
        out = model(batch(step, rank, 6))
        assert out.dtype == low and model.seen == low
        return out.float().pow(2).sum()

    # Torch's batch norm takes no 16-bit weights beside running statistics in float32 on CPUs.
    for norm in (nn.LayerNorm, lambda width: nn.GroupNorm(2, width)):
        program = Program(lambda norm=norm: normed(norm), loss, steps=3)  # type: ignore[misc]
        mine, theirs = (train(engine, program, wrapping, rank) for engine in (ours(), TORCH))
        if SUMS_IN_OWN_DTYPE:
            assert_same_bits(mine, theirs)
        assert all(g.dtype == torch.float32 for step in mine.steps for g in step.gradients.values())  # type: ignore[union-attr]


class Tied(nn.Module):
    """Used several times in a forward: the table, and the first layer if `again`."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Tanh()) for _ in range(2))
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for layer in (*self.layers, *self.layers[: int(self.again)]):
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def gradients_as_computed(rank: int, kind: str) -> None:
    """Autograd brings gradients in the dtypes in which torch's engine gets them, also where backwards accumulate."""

    def loss(model: Any, number: int, rank: int) -> torch.Tensor:
        tokens = (batch(number, rank, 4).abs() * 8).long() % 12
        return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())

    for (compute, reduce), (again, backwards) in product([(LOW, torch.float32), (None, LOW)], [(False, 3), (True, 1)]):
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)

        def wrap(engine: Engine, model: Tied, policy: MixedPrecisionPolicy = policy) -> None:
            for part in (*model.layers, model):
                getattr(engine, kind)(part, mp_policy=policy)

        def before(model: Any, part: int, last: int = backwards - 1) -> None:
            model.set_requires_gradient_sync(part == last)

        program = Program(partial(Tied, again), loss, steps=3, parts=backwards)
        assert_same_bits(*(train(engine, program, Wrapping(wrap, before), rank) for engine in (ours(), TORCH)))


def keep_norms(parameter: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if parameter.ndim == 1 and parameter.shape[0] == 8 else None


class Explicit(Normed):
    """Casts where a kept parameter would meet another dtype; its norm and the first bias are in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(x.to(LOW), self.first.weight.to(LOW)).float() + self.first.bias
        hidden = nn.functional.layer_norm(hidden, (8,), self.norm.weight, self.norm.bias).to(LOW)  # type: ignore[arg-type]
        return nn.functional.linear(torch.tanh(hidden), self.last.weight.to(LOW), self.last.bias.to(LOW))


def kept(rank: int, function: str, reduce: torch.dtype | None) -> None:
    policy: Any = MixedPrecisionPolicy(LOW, reduce, param_dtype_override_fn=keep_norms)
    reference = normed(kind=Explicit)
    engines = [ours(), *([TORCH] if HAS_OVERRIDES else [])]
    models: list[Any] = [normed(kind=Explicit) for _ in engines]
    dtypes: dict[str, torch.dtype] = {}
    for engine, model in zip(engines, models, strict=True):
        getattr(engine, function)(model, mp_policy=policy)
    with torch.no_grad():
        models[0].unshard()
        dtypes = {name: each.dtype for name, each in models[0].named_parameters()}
        models[0].reshard()
    low = {"first.weight", "last.weight", "last.bias"}
    if function == "fully_shard":
        assert dtypes == {name: LOW if name in low else torch.float32 for name in dtypes}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (reference, *models)]
    for step in range(3):
        for part in range(2):
            (reference(batch(step, part, 6)).float().pow(2).sum() / 2).backward()
        for model in models:
            model(batch(step, rank, 6)).float().pow(2).sum().backward()
        for name, whole in reference.named_parameters():
            mine = models[0].get_parameter(name).grad
            assert mine.dtype == torch.float32, name
            exact = name not in low and reduce is None
            torch.testing.assert_close(mine.full_tensor(), whole.grad, rtol=1e-2, atol=1e-5 if exact else 3e-2)
            for other in models[1:]:
                theirs = other.get_parameter(name).grad
                torch.testing.assert_close(local(mine), local(theirs), rtol=1e-2, atol=1e-3)
        step_all(optimizers)


def kept_of_tensor_parallel(rank: int) -> None:
    """A kept parameter that is a DTensor, on the meta device at first, and cast after it was wrapped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model: Any = nn.Linear(6, 8)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter, mesh["tp"], [Shard(0)])))
    override: Any = {"param_dtype_override_fn": lambda each: torch.float32 if each.ndim == 1 else None}
    shardwise.fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(LOW, **override))
    model.to_empty(device="cpu")
    model.unshard()
    assert model.weight.dtype == LOW and model.bias.dtype == torch.float32
    model.reshard()
    model.double()
    model.unshard()
    # What is kept is the dtype to compute in.
    assert model.weight.dtype == LOW and model.bias.dtype == torch.float32
    assert isinstance(model.bias, DTensor) and model.bias.to_local().shape == (4,)
    model.reshard()


def refused(rank: int) -> None:
    def expect(text: str, chosen: Any) -> None:
        policy: Any = MixedPrecisionPolicy(LOW, param_dtype_override_fn=lambda _: chosen)
        for function in ("fully_shard", "replicate"):
            model = nn.Linear(3, 3)
            with pytest.raises(ValueError, match=text):
                getattr(shardwise, function)(model, mp_policy=policy)
            assert type(model) is nn.Linear

    expect("must return a torch.dtype or None but got str for 'weight'", "float32")
    expect(
        "must return None, param_dtype, or the parameter's original dtype but got torch.float64 for 'weight' with "
        "dtype torch.float32 and param_dtype torch.bfloat16",
        torch.float64,
    )


def cpp_modules(rank: int) -> None:
    """C++ modules from Python ask the same function."""
    names: list[Any] = []

    def choose(parameter: torch.Tensor) -> torch.dtype | None:
        names.append(parameter.ndim)
        return torch.float32 if parameter.ndim == 1 else None

    model = bound_models().Chain(4, 2)
    policy: Any = MixedPrecisionPolicy(LOW, param_dtype_override_fn=choose)
    shardwise.fully_shard(model, mp_policy=policy)
    units = json.loads(shardwise.plan(model).json())["units"]
    groups = [group for unit in units for group in unit["groups"]]
    assert {group["compute_dtype"] for group in groups} == {"float32", "bfloat16"} and 1 in names


def unequal(rank: int, reduce: torch.dtype | None) -> None:
    """One unit with parameters of several dtypes: each is summed in its own, or in reduce_dtype."""
    kinds = (torch.float32, LOW, torch.float64)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layers = nn.ModuleList(nn.Linear(5, 3).to(kind) for kind in kinds)

        def forward(self, step: int, part: int) -> torch.Tensor:
            losses = [
                layer(batch(step, part, 5).to(kind)).double().pow(2).sum()
                for layer, kind in zip(self.layers, kinds, strict=True)
            ]
            return torch.stack(losses).sum()

    reference = Whole()
    model: Any = Whole()
    shardwise.fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02, foreach=False) for each in (reference, model)]
    for step in range(3):
        before = unit_of(model).counters()["reduce_scatters"]
        rounded_backward(reference, lambda each, part, step=step: each(step, part), 2, reduce=reduce)
        model(step, rank).backward()
        assert unit_of(model).counters()["reduce_scatters"] == before + len(kinds)
        for name, whole in reference.named_parameters():
            mine = model.get_parameter(name).grad
            assert whole.grad is not None and mine.dtype == whole.dtype
            exact = {"rtol": 1e-2, "atol": 1e-3} if whole.dtype == LOW else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(mine.full_tensor(), whole.grad, **exact)
        step_all(optimizers)


def gradients_of_another_dtype(rank: int) -> None:
    """Parameters whose grad_dtype the program set: sums and gradients are in it, through casts and steps."""
    engines = [ours(), *([TORCH] if SUMS_IN_OWN_DTYPE else [])]
    for own, low in ((LOW, None), (torch.float32, LOW)):
        wanted = torch.float32 if own is LOW else torch.float64
        models: list[Any] = []
        for engine in engines:
            model: Any = normed().to(own)
            for parameter in model.parameters():
                parameter.grad_dtype = wanted
            models.append(wrap(engine, model, mp_policy=MixedPrecisionPolicy(param_dtype=low)))
        for step in range(3):
            for model in models:
                model(batch(step, rank, 6).to(low or own)).double().pow(2).sum().backward()
            for name, mine in models[0].named_parameters():
                assert mine.grad.dtype == wanted and mine.grad_dtype == wanted, name
                for other in models[1:]:
                    torch.testing.assert_close(local(mine.grad), local(other.get_parameter(name).grad))
            for model in models:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(parameter.grad.to(parameter.dtype), alpha=-0.05)
                model.zero_grad()
        models[0].reshard()
        models[0].double()
        assert {parameter.grad_dtype for parameter in models[0].parameters()} == {wanted}


class TestFullyShardMixedPrecisionCasts:
    test_norm_modules_bf16 = on_ranks(2, norms, LOW)
    test_norm_modules_fp16 = on_ranks(2, norms, torch.float16)


class TestFullyShardCollectiveOps:
    test_reduce_scatter_unequal_dtypes = on_ranks(2, unequal, each=[None, torch.float32])


class TestParamDtypes:
    test_kept = on_ranks(2, kept, each=[("fully_shard", None), ("replicate", LOW)])

    @pytest.mark.skipif(not SUMS_IN_OWN_DTYPE, reason="this torch's engine rounds gradients first")
    @pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
    def test_gradients_as_computed(self, kind: str) -> None:
        run_ranks(2, gradients_as_computed, kind)

    def test_gradients_of_another_dtype(self) -> None:
        run_ranks(2, gradients_of_another_dtype)

    test_tensor_parallel_on_meta = on_ranks(4, kept_of_tensor_parallel)
    test_refused = on_ranks(2, refused)
    test_cpp_modules = on_ranks(2, cpp_modules)
