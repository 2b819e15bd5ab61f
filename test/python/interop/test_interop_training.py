"""What is sent in which dtype, and for which parameters: mixed precision, and parameters that are frozen in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from engine import TORCH, ours
from layouts import RANKS, by_layer
from models import batch, local, mlp
from parity import Parity, Wrapping, assert_same_bits, train
from pool import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from training_models import mlp_program


class Sent(TorchDispatchMode):
    """Collectives in their order: their names, and the dtype and the size of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ != "barrier":
            output = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.calls.append((func.overloadpacket.__name__, output.dtype, output.numel()))
        return func(*args, **(kwargs or {}))

    def sums(self) -> list[tuple[str, torch.dtype, int]]:
        return [call for call in self.calls if call[0] in ("_reduce_scatter_base_", "allreduce_")]

    def dtypes(self, name: str) -> set[torch.dtype]:
        return {dtype for each, dtype, _ in self.calls if each == name}


#: Since torch 2.15 sums are in the parameters' own dtype where none is named.
UNNAMED = torch.float32 if torch.__version__ >= "2.15" else torch.bfloat16

#: param_dtype, reduce_dtype, and the dtype that sums have to be in.
POLICIES = [
    (torch.bfloat16, None, UNNAMED),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float16, torch.float32, torch.float32),
    (None, torch.bfloat16, torch.bfloat16),
]


def dtypes(rank: int, layout: str) -> None:
    for param_dtype, reduce_dtype, in_sums in POLICIES:
        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
        # torch 2.15 rounds the gradients of each backward to the dtype of sums before it adds them.
        parts = 1 if param_dtype is None and torch.__version__ >= "2.15" else 2
        program = mlp_program((6, 8, 4), steps=3, parts=parts)

        def before(model: Any, part: int, parts: int = parts) -> None:
            # What is not summed yet adds up in the dtype of sums.
            model.set_requires_gradient_sync(part == parts - 1)

        wrapping = Wrapping(by_layer(layout, mp_policy=policy), before=before)
        traces, sent = [], []
        for engine in (TORCH, ours()):
            with Sent() as calls:
                traces.append(train(engine, program, wrapping, rank))
            sent.append(calls)
        assert_same_bits(traces[1], traces[0])
        assert {loss.dtype for loss in traces[1].steps[2].losses[0]} == {param_dtype or torch.float32}
        # Sums are padded in another way than torch's.
        assert [call[:2] for call in sent[1].sums()] == [call[:2] for call in sent[0].sums()]
        assert {dtype for _, dtype, _ in sent[1].sums()} == {in_sums}
        if layout == "fully_shard":
            # Wrapped modules are compared once, in integers.
            gathered = sent[1].dtypes("_allgather_base_") - {torch.int64}
            assert gathered == {param_dtype or torch.float32}, gathered


class Thaw:
    """Before the second step's optimizer what was frozen no longer is, and before the fourth's something else is."""

    def __init__(self) -> None:
        # Not by id(): a model may lie where one before it lay, on some ranks alone.
        self.calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __call__(self, model: Any) -> None:
        calls = self.calls[model] = self.calls.get(model, 0) + 1
        if calls == 2:
            model.requires_grad_(True)
        elif calls == 4:
            model[2].requires_grad_(False)


@torch.no_grad()
def look(model: Any, part: int) -> None:
    """A forward that no backward follows."""
    model(torch.ones(2, 64))


def partly_frozen() -> nn.Module:
    model: Any = mlp_program((64, 64, 64, 2)).make()
    model[0].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    return model


def frozen(rank: int, layout: str) -> None:
    program = mlp_program((64, 64, 64, 2), steps=6)
    parity = Parity(replace(program, make=partly_frozen, between=Thaw()))
    traces, sent = [], []
    for engine in (TORCH, ours()):
        with Sent() as calls:
            traces.append(parity.run(engine, Wrapping(by_layer(layout), before=look)))
        sent.append(calls)
    assert_same_bits(traces[1], traces[0])
    mine, theirs = (sorted(size for _, _, size in each.sums()) for each in reversed(sent))
    # What is frozen is not sent: the first layer's bias, then all of it; the second until it is frozen; the last once
    # it is not. Padding, and what tells which parameters were used, come on top.
    share = 2 if layout == "fully_shard" else 1
    expected = sorted([64] * 2 + [64 * 65] * 4 + [64 * 65] * 4 + [2 * 65] * 4)
    assert theirs == [size // share for size in expected]
    assert len(mine) == len(theirs)
    assert all(low <= size <= low + 300 for size, low in zip(mine, theirs, strict=True)), f"{mine} for {theirs}"


def all_reduce_comes_back(rank: int) -> None:
    """set_requires_gradient_sync(True) asks for all sums, whatever was asked before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for engine in (TORCH, ours()):
        model: Any = mlp(3, 4, 2)
        engine.fully_shard(model, mesh=mesh)
        for step, summed in enumerate((False, True)):
            model.set_requires_all_reduce(False)
            if summed:
                model.set_requires_gradient_sync(True)
            model(batch(step, rank, 3)).square().sum().backward()
        found.append([local(parameter.grad) for parameter in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def divided(rank: int, layout: str) -> None:
    """A factor is the module's own, under both names; whether it is applied before the sum or after it changes no more
    than rounding does."""
    for force_sum in (False, True):
        seen: list[list[torch.Tensor]] = []
        runs = [(ours(), True), (ours(), False)]
        # Without it torch asks for a collective that Gloo does not have.
        if force_sum:
            runs.append((TORCH, True))
        for engine, factors in runs:
            model: Any = mlp(6, 8, 8, 4)
            by_layer(layout)(engine, model)
            for module in (model[0], model[2], model):
                module.set_force_sum_reduction_for_comms(force_sum)
            if factors:
                model[0].set_gradient_divide_factor(1.0)
                model[2].set_reduce_scatter_divide_factor(3.0)
            found = []
            for step in range(3):
                model(batch(step, rank, 6)).pow(2).mean().backward()
                found += [local(p.grad).clone() for p in model.parameters()]
                model.zero_grad()
            seen.append(found)
        ranks = dist.get_world_size()
        for number, (mine, mean, *theirs) in enumerate(zip(*seen, strict=True)):
            factor = {0: 1.0, 1: 3.0, 2: ranks}[number % 6 // 2]
            what = f"force_sum {force_sum}, gradient {number}"
            # torch's replicate() divides twice by a factor of one's own that comes after the sum.
            twice = factor if layout == "replicate" and number % 6 < 4 else 1
            for expected in (mean * (ranks / factor), *(each * twice for each in theirs)):
                torch.testing.assert_close(mine, expected, msg=lambda text, w=what: f"{w}: {text}")


class TestInteropTraining:
    @pytest.mark.parametrize("layout", ["fully_shard", "replicate", "hsdp"])
    def test_divide_factors(self, layout: str) -> None:
        run_ranks(RANKS[layout], divided, layout)

    @pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
    def test_dtypes_of_sums(self, layout: str) -> None:
        run_ranks(2, dtypes, layout)

    @pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
    def test_frozen_in_between(self, layout: str) -> None:
        run_ranks(2, frozen, layout)

    def test_all_reduce_comes_back(self) -> None:
        run_ranks(4, all_reduce_comes_back)
