"""Bound C++ modules: their methods and errors, inside of modules of Python, and on process groups made in C++."""

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bound import Pair, chain_loss, counted, models, stack_loss, twin, wrap_stack
from pool import on_ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import shardwise
from shardwise import testing
from shardwise.cpp import as_module


class Gather:
    """A collective in Python, called below a forward in C++ and in a backward."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *, output_tensor: Any, input_tensor: Any, group: Any, op: Any = None, async_op: bool) -> Any:
        self.calls += 1
        if op is None:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def check_methods(rank: int) -> None:
    stack, plain = twin("Stack", 6, 2)
    wrap_stack(stack, mp_policy=MixedPrecisionPolicy(), offload_policy=CPUOffloadPolicy())
    assert isinstance(stack, shardwise.FSDPModule) and isinstance(stack, type(models().Stack(6, 1)))
    assert type(stack).__name__ == "FSDPStack"
    assert [unit["name"] for unit in shardwise.plan(stack).units] == ["blocks.0", "blocks.1", ""]
    first, second = as_module(stack.block(0)), as_module(stack.block(1))
    assert isinstance(first, shardwise.FSDPModule) and first.cpp_module is stack.block(0)
    assert str(shardwise.plan(first)) == str(shardwise.plan(stack.block(0)))

    comm = Gather()
    first.set_custom_all_gather(comm)
    first.set_custom_reduce_scatter(comm)
    sums: list[torch.Tensor] = []
    second.set_all_reduce_hook(sums.append)
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    pair = Pair(stack, plain, stack_loss)
    pair.train(range(4))
    assert comm.calls == 4 * 3 and len(sums) == 4

    before = counted(first)["all_gathers"]
    handle = first.unshard(async_op=True)
    handle.wait()
    assert counted(first)["all_gathers"] == before + 1
    assert counted(first)["unsharded_bytes"] > 0
    first.reshard()
    x = torch.ones(2, 6)
    torch.testing.assert_close(first.reversed(x), plain.blocks[0].reversed(x))
    shardwise.register_fsdp_forward_method(first, "reversed")
    torch.testing.assert_close(first.reversed(x), plain.blocks[0].reversed(x))

    stack.set_reshard_after_forward(False)
    second.reshard()
    before = counted(second)["all_gathers"]
    pair.backward(9)
    assert counted(second)["all_gathers"] == before + 1
    for change in (stack.set_is_last_backward, stack.set_requires_all_reduce, stack.set_reshard_after_backward):
        change(True)
    stack.set_gradient_divide_factor(2.0)
    first.set_unshard_in_backward(True)
    other, _ = twin("Stack", 6, 2)
    shardwise.share_comm_ctx([stack, shardwise.fully_shard(other)])
    pair.check("in the end")
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(stack)


def check_errors(rank: int) -> None:
    stack = models().Stack(6, 2)
    with pytest.raises(TypeError, match="cannot form one unit"):
        shardwise.fully_shard([stack.block(0), nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        shardwise.fully_shard(stack, mesh=2)
    with pytest.raises(TypeError, match="mp_policy must be a MixedPrecisionPolicy"):
        shardwise.replicate(stack, mp_policy=torch.bfloat16)
    with pytest.raises(ValueError, match="bool or an int"):
        shardwise.fully_shard(stack, reshard_after_forward="yes")
    with pytest.raises(AssertionError, match=r"Shard dim 7 is invalid for 2D tensor: .* of 'embedding.weight'"):
        shardwise.fully_shard(stack, shard_placement_fn=lambda parameter: Shard(7))
    with pytest.raises(TypeError, match="expected a C\\+\\+ module"):
        shardwise.cpp.full_state_dict(nn.Linear(2, 2))
    assert type(stack) is models().Stack, "a call that failed leaves the class alone"
    wrap_stack(stack)
    with pytest.raises(ValueError, match="already"):
        shardwise.fully_shard(stack)
    with pytest.raises(ValueError, match="already managed by"):
        shardwise.replicate(stack)
    with pytest.raises(ValueError, match="should be a bool"):
        stack.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="neither fully_shard\\(\\) nor replicate\\(\\) was called"):
        shardwise.plan(models().Stack(6, 1))


class TestInterface:
    test_methods = on_ranks(2, check_methods)
    test_errors = on_ranks(2, check_errors)


class Around(nn.Module):
    """A module of Python with a C++ module inside."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stack = stack
        self.out = nn.Linear(11, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.stack(x)))


def check_mixed_tree(rank: int) -> None:
    for function in (shardwise.fully_shard, shardwise.replicate):
        stack, plain_stack = twin("Stack", 6, 2)
        model, plain = Around(stack), Around(plain_stack)
        with pytest.raises(ValueError, match=r"'stack' is a C\+\+ module, and its parameter 'stack.embedding.weight'"):
            function(model)
        assert type(model) is Around and type(stack) is models().Stack
        for module in (stack.block(0), stack.block(1), stack, model):
            function(module)
        mine = Pair(model, plain, stack_loss, None if function is shardwise.fully_shard else 1)
        for step in range(4):
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                mine.backward(2 * step + part)
                assert all((parameter.grad is None) == (part == 0) for parameter in model.parameters())
            mine.step(f"{function.__name__}, step {step}")
        model.train(False)
        assert not stack.training
        check_clipping(mine, function.__name__)

    stack, plain_stack = twin("Stack", 6, 2)
    model, plain = Around(stack), Around(plain_stack)
    shardwise.fully_shard(model, ignored_params=set(stack.parameters()))
    stack_loss(model, 0, rank).backward()
    stack_loss(plain, 0, rank).backward()
    for (name, mine_), theirs in zip(stack.named_parameters(), plain_stack.parameters(), strict=True):
        torch.testing.assert_close(mine_.grad, theirs.grad, msg=lambda text, n=name: f"{n}, this rank's alone: {text}")


def check_clipping(pair: Pair, what: str) -> None:
    """One norm over the shards of the C++ module and the DTensors of the module of Python."""
    pair.backward(40)
    expected = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01, 1.0)
    found = shardwise.cpp.clip_grad_norm_(pair.model, 0.01, 1.0)
    torch.testing.assert_close(found.item(), expected.item(), rtol=1e-5, atol=0)
    pair.check(f"{what}, clipped")
    broken = pair.model.get_parameter("out.bias").grad.to_local()
    if pair.rank == 1 or what == "replicate":
        broken[0] = float("nan")
    with pytest.raises(shardwise.Error, match="no gradient was changed"):
        shardwise.cpp.clip_grad_norm_(pair.model.parameters(), 0.01, error_if_nonfinite=True)


class TestMixedTree:
    test_cpp_module_in_a_module_of_python = on_ranks(2, check_mixed_tree)


class TestProcessGroupsMadeInCpp:
    def test_ranks_as_threads(self) -> None:
        """The forwards in C++ hold the GIL, but not while they wait: the other rank is a thread that needs it."""
        run_ranks(1, check_threads, backend=None, timeout=60)

    def test_modules_of_python(self, tmp_path: Path) -> None:
        # In new processes: torch keeps the meshes of earlier tests, and gives them to DTensors with an equal one.
        testing.run_ranks(2, check_modules_of_python, str(tmp_path), backend=None)


def check_threads(rank: int) -> None:
    # torch's recorder of collectives is not made for ranks of one process.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(train_with_group_of_cpp, store), range(2)))


def train_with_group_of_cpp(store: Any, rank: int) -> None:
    mesh = models().make_mesh(store, rank, [("shard", 2)])
    stack, plain = twin("Stack", 6, 2)
    wrap_stack(stack, mesh=mesh.group("shard"))
    Pair(stack, plain, stack_loss, place=(rank, 2)).train(range(4))
    stack, plain = twin("Stack", 6, 2)
    wrap_stack(stack, mesh=mesh, reshard_after_forward=False)
    Pair(stack, plain, stack_loss, place=(rank, 2)).train(range(4))
    chain, plain = twin("Chain", 6, 2)
    shardwise.replicate(chain, mesh=mesh.group("shard"))
    Pair(chain, plain, chain_loss, shards=1, place=(rank, 2)).train(range(4))


def check_modules_of_python(rank: int, folder: str) -> None:
    """The first group becomes the default one; the second has the same name, and other ranks in another order."""
    store = dist.FileStore(f"{folder}/store", 2)
    first = models().make_mesh(store, rank, [("shard", 2)])
    assert not dist.is_initialized()
    for function, shards in ((shardwise.fully_shard, 2), (shardwise.replicate, 1)):
        bound, plain = twin("Chain", 6, 2)
        model = copy.deepcopy(plain)
        function(model.layers[1], mesh=first.group("shard"))
        function(model, mesh=first)
        meshes = [parameter.device_mesh for parameter in model.parameters()]
        assert all(mesh is meshes[0] for mesh in meshes) and meshes[0].mesh.tolist() == [0, 1]
        Pair(model, plain, chain_loss, shards, place=(rank, 2)).train(range(2))
        torch.testing.assert_close(model.layers[0].weight.full_tensor(), plain.layers[0].weight)
        function(bound, mesh=first)
    assert dist.get_rank() == rank and dist.get_world_size() == 2

    second = models().make_mesh(dist.PrefixStore("again", store), 1 - rank, [("shard", 2)])
    plain = twin("Chain", 6, 2)[1]
    model = shardwise.fully_shard(copy.deepcopy(plain), mesh=second.group("shard"))
    assert model.layers[0].weight.device_mesh.mesh.tolist() == [1, 0]
    Pair(model, plain, chain_loss, place=(1 - rank, 2)).train(range(2))
    torch.testing.assert_close(model.layers[0].weight.full_tensor(), plain.layers[0].weight)
    grid = models().make_mesh(dist.PrefixStore("grid", store), rank, [("replicate", 2), ("shard", 1)])
    with pytest.raises(ValueError, match=r"must have one axis, but Mesh\(replicate=2, shard=1; .*from_group"):
        shardwise.fully_shard(twin("Chain", 6, 2)[1], mesh=grid)
