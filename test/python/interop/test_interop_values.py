"""Values that come from outside: loads, writes by hand, initialisation, buffers; and what a state dict shares."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from engine import TORCH, Engine, ours
from form import by_form
from layouts import RANKS, by_layer
from models import batch, local, mean_square, mlp, whole
from parity import Parity, Program, Wrapping, counting
from pool import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

WIDTHS = (6, 8, 4)

WHOLE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def changed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Other values for all of a model's parameters."""
    return {name: whole(p) * 0.5 + 0.25 for name, p in model.named_parameters()}


def load(model: Any, values: dict[str, torch.Tensor]) -> None:
    # torch puts the model's own tensors into the dict.
    set_model_state_dict(model, dict(values), options=WHOLE)


def average(model: Any, values: dict[str, torch.Tensor]) -> None:
    """As an exponential moving average is copied in: in place, from other tensors of the same kind."""
    other = mlp(*WIDTHS)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(values[name])
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(distribute_tensor(theirs.detach(), mine.device_mesh, mine.placements, src_data_rank=None))


def write(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Through the memory of the shards."""
    for name, parameter in model.named_parameters():
        parameter.to_local().mul_(0.5).add_(0.25)
        assert torch.equal(whole(parameter), values[name])


@torch.no_grad()
def values_from_outside(rank: int, layout: str) -> None:
    # R51: the next forward uses them, also where full copies were kept, or stand in another dtype.
    kinds = ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)})
    keeps = (False, True) if layout != "replicate" else (None,)
    for keep in keeps:
        for kind in kinds:
            options = kind if keep is None else {**kind, "reshard_after_forward": keep}
            every = list(product((load, average, write), (False, True)))
            for change, evaluates in by_form(every[::3] + every[2:3], every):
                assert_used(layout, options, change, evaluates)


def assert_used(layout: str, options: dict[str, Any], change: Any, evaluates: bool) -> None:
    dtype = torch.bfloat16 if "mp_policy" in options else torch.float32
    for engine in (TORCH, ours()):
        model: Any = mlp(*WIDTHS)
        reference = mlp(*WIDTHS)
        by_layer(layout, **options)(engine, model)
        x = batch(0, 0, WIDTHS[0])
        model.train(not evaluates)
        before = model(x)
        model.reshard()
        for module in model:
            if isinstance(module, engine.FSDPModule):
                module.reshard()
        values = changed(reference)
        change(model, values)
        after = model(x)
        reference.load_state_dict(values)
        expected = copy.deepcopy(reference).to(dtype)(x.to(dtype))
        assert not torch.equal(after, before)
        assert torch.equal(after, expected), f"{engine.name}, {options}, {change.__name__}: {after} for {expected}"
        saved = get_model_state_dict(model, options=WHOLE)
        assert all(torch.equal(saved[name], value) for name, value in values.items()), "what is saved is not what it is"


class Initialised(nn.Module):
    """Two layers of the same shape, one with an own rule, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.two(torch.tanh(self.one(x))))


def from_meta(engine: Engine, name: str, **options: Any) -> Any:
    with torch.device("meta"):
        model: Any = Initialised()
    for part in (model.one, model.two, model):
        getattr(engine, name)(part, **options)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            local(tensor).fill_(float("nan"))
    return model


def initialised(rank: int, name: str) -> None:
    # R61, R62: nothing is left as the memory was, and no layer is like another, also with offload.
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        drawn = []
        for engine in (TORCH, ours()):
            model = from_meta(engine, name, **options)
            torch.manual_seed(11 + rank)
            for module in (model.one, model.two, model.norm):
                module.reset_parameters()
            full = {each: whole(p) for each, p in model.named_parameters()}
            assert all(bool(value.isfinite().all()) for value in (*full.values(), *model.buffers()))
            for kind in ("weight", "bias"):
                assert not torch.equal(full[f"one.{kind}"], full[f"two.{kind}"])
            if name == "fully_shard":
                # Each rank draws its own part: they differ where their seeds do.
                top, bottom = full["one.weight"].chunk(2)
                assert not torch.equal(top, bottom)
            drawn.append([local(p).clone() for p in model.parameters()])
            model(batch(0, rank, 8)).sum().backward()
            assert all(p.grad is not None and bool(local(p.grad).isfinite().all()) for p in model.parameters())
        # The same numbers, in the same order, as with torch's engine.
        assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


def different_seeds(rank: int, layout: str) -> None:
    # R63: neither engine compares or sends values: a rank keeps, or cuts its shard from, what it had. The remedy is a
    # load from rank 0, after which copies are the same everywhere.
    for engine in (TORCH, ours()):
        torch.manual_seed(100 + rank)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        own = copy.deepcopy(model)
        by_layer(layout)(engine, model)
        for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
            rows = mine.to_local().shape[0]
            first = 0 if rows == theirs.shape[0] else rank % 2 * rows
            assert torch.equal(local(mine), theirs[first : first + rows])
        values = own.state_dict() if rank == 0 else {}
        set_model_state_dict(model, values, options=FROM_RANK_0)
        full = {name: whole(p) for name, p in model.named_parameters()}
        sent = [{name: p.detach() for name, p in own.named_parameters()}]
        dist.broadcast_object_list(sent, 0)
        assert all(torch.equal(value, sent[0][name]) for name, value in full.items())


class Counting(nn.Linear):
    """Its buffer is another tensor after every forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.detach().sum(0)
        return super().forward(x)


def buffers(rank: int, name: str) -> None:
    # R64: buffers stay each rank's own, and are looked up by name: one that is assigned anew is the one that is saved.
    for engine in (TORCH, ours()):
        torch.manual_seed(3)
        model: Any = nn.Sequential(Counting(), nn.BatchNorm1d(4))
        own = copy.deepcopy(model)
        getattr(engine, name)(model[0])
        getattr(engine, name)(model)
        counts: dict[str, int] = {}
        for step in range(3):
            x = batch(step, rank, 4)
            with counting(counts, "calls"):
                output = model(x)
            torch.testing.assert_close(output, own(x))
        assert counts == ({} if name == "replicate" else {"_allgather_base_": 4}), counts
        for each, value in own.named_buffers():
            assert torch.equal(model.state_dict()[each], value), each
            assert torch.equal(model.get_buffer(each), value), each
        model.load_state_dict({**model.state_dict(), "0.seen": torch.ones(4)})
        x = batch(9, rank, 4)
        model(x)
        assert torch.equal(model[0].seen, 1 + x.sum(0))


class Watched(nn.Linear):
    """It looks at its parameters when they are set, and computes with what it saw."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            object.__setattr__(self, "seen", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: Any = self.seen
        return torch.nn.functional.linear(x, seen, self.bias)


def set_in_their_own_way(rank: int, name: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(Watched(6, 5), nn.Tanh(), Watched(5, 4))

    def wrap(engine: Engine, model: Any) -> None:
        for module in (model[0], model):
            getattr(engine, name)(module)

    def look(model: Any) -> None:
        assert [layer.seen is layer.weight for layer in (model[0], model[2])] == [True, True]

    Parity(Program(make, mean_square, steps=3)).both(Wrapping(wrap, after_optimizer=look))


class TestInteropValues:
    test_the_next_forward_uses_them = on_ranks(RANKS, values_from_outside, each=[*RANKS])
    test_modules_that_see_what_is_set = on_ranks(2, set_in_their_own_way, each=["fully_shard", "replicate"])


class TestInteropInitialisation:
    test_from_the_meta_device = on_ranks(2, initialised, each=["fully_shard", "replicate"])
    test_ranks_with_different_seeds = on_ranks(RANKS, different_seeds, each=[*RANKS])


class TestInteropBuffers:
    test_each_rank_has_its_own = on_ranks(2, buffers, each=["fully_shard", "replicate"])
