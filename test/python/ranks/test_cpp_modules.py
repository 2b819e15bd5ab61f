"""C++ modules that torch::python::bind_module made known: the C++ front end, driven from Python."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from bound import Pair, branches_loss, chain_loss, counted, stack_loss, twice_loss, twin, wrap_stack
from pool import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.cpp import ModuleWrapper

import shardwise


def check_training(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for reshard in (True, None):
        stack, plain = twin("Stack", 6, 2)
        wrap_stack(stack, mesh=mesh, reshard_after_forward=reshard)
        before = counted(stack)["all_gathers"]
        Pair(stack, plain, rank, 2).train(stack_loss, f"several units, reshard {reshard}")
        assert counted(stack)["reduce_scatters"] == 4 * 3
        # In forward, and in backward what was freed in between: all three or the blocks.
        assert counted(stack)["all_gathers"] - before == 4 * (3 + (3 if reshard else 2))
    stack, plain = twin("Stack", 6, 3)
    shardwise.fully_shard([stack.block(2), stack.block(0)], shard_placement_fn=last_dim)
    shardwise.fully_shard(stack)
    pair = Pair(stack, plain, rank, 2)
    pair.dims = {
        name: 1
        for name, parameter in plain.named_parameters()
        if name.startswith(("blocks.0", "blocks.2")) and parameter.dim() == 2
    }
    pair.train(stack_loss, "a list, cut along the last dimension")
    assert counted(stack)["reduce_scatters"] == 8


def last_dim(parameter: torch.Tensor) -> Shard | None:
    return Shard(-1) if parameter.dim() > 1 else None


def check_replicas(rank: int) -> None:
    for name, loss in (("Branches", branches_loss), ("Twice", twice_loss)):
        model, plain = twin(name)
        for inner in model._modules.values() if name == "Twice" else ():
            assert shardwise.replicate(inner) is inner
        assert shardwise.replicate(model) is model
        assert type(model).__name__ == f"Replicate{name}"
        assert isinstance(model, shardwise.ReplicateModule) and isinstance(model, ModuleWrapper)
        Pair(model, plain, rank, 2, shards=1).train(loss, name)


def check_accumulation(rank: int) -> None:
    world = dist.get_world_size()
    for function in (shardwise.fully_shard, shardwise.replicate):
        stack, plain = twin("Stack", 6, 2)
        for module in (stack.block(0), stack.block(1), stack):
            function(module)
        pair = Pair(stack, plain, rank, world, shards=None if function is shardwise.fully_shard else 1)
        for step in range(3):
            before = counted(stack)
            for part in range(3):
                # The flag reaches the blocks too, which are no nn.Modules.
                stack.set_requires_gradient_sync(part == 2)
                pair.backward(stack_loss, 3 * step + part)
                if part < 2:
                    assert all(parameter.grad is None for parameter in stack.parameters())
            pair.check(f"{function.__name__}, step {step}")
            sums = sum(counted(stack)[name] - before[name] for name in ("reduce_scatters", "all_reduces"))
            assert sums == 3
            pair.step()
        stack.set_manual_backward_finalization(True)
        for step in range(3, 5):
            stack.set_requires_gradient_sync(False)
            for part in range(2):
                pair.backward(stack_loss, 3 * step + part)
            stack.set_requires_gradient_sync(True)
            stack.finalize_backward()
            pair.check(f"{function.__name__}, step {step}, finalized")
            pair.step()


class TestTraining:
    def test_sharded(self) -> None:
        run_ranks(2, check_training)

    def test_replicated_and_accumulated(self) -> None:
        run_ranks(2, check_replicas_and_accumulation)

    def test_hybrid(self) -> None:
        run_ranks(4, check_hybrid)


def check_replicas_and_accumulation(rank: int) -> None:
    check_replicas(rank)
    check_accumulation(rank)


def check_hybrid(rank: int) -> None:
    stack, plain = twin("Stack", 6, 2)
    wrap_stack(stack, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    Pair(stack, plain, rank, 4, shards=2).train(stack_loss, "on two axes")
    assert counted(stack)["all_reduces"] == 12


def check_state(rank: int) -> None:
    world = dist.get_world_size()
    stack, plain = twin("Stack", 6, 2)
    if rank == 1:
        # Everyone gets what rank 0 has.
        for parameter in stack.parameters():
            parameter.data.add_(1)
    wrap_stack(stack)
    pair = Pair(stack, plain, rank, world)
    pair.train(stack_loss, "before", steps=2)
    kept = shardwise.cpp.full_state_dict(stack)
    assert_same_tensors(kept, plain.state_dict())
    assert (shardwise.cpp.full_state_dict(stack, rank0_only=True) == {}) == (rank > 0)

    pair.backward(stack_loss, 7)
    total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    found = shardwise.cpp.clip_grad_norm_(stack, 0.01)
    torch.testing.assert_close(found.item(), total.item())
    pair.check("clipped")
    pair.step()
    pair.backward(stack_loss, 8)
    total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type=1.0)
    found = shardwise.cpp.clip_grad_norm_(stack.parameters(), 1e9, norm_type=1.0)
    torch.testing.assert_close(found.item(), total.item())
    pair.step()

    # Back to what was kept; the optimizer goes on with the same tensors.
    loaded = shardwise.cpp.load_full_state_dict(stack, kept if rank == 0 else {})
    assert (loaded.missing, loaded.unexpected) == ([], []) and loaded.elements == sum(t.numel() for t in kept.values())
    plain.load_state_dict(kept)
    pair.train(stack_loss, "after")
    with pytest.raises(shardwise.Error, match=r"head\.weight"):
        shardwise.cpp.load_full_state_dict(stack, {name: t for name, t in kept.items() if name != "head.weight"})


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda text, n=name: f"{n}: {text}")


def check_precision(rank: int) -> None:
    """Parameters in bfloat16 compute, their gradients are summed in float."""
    world = dist.get_world_size()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
    )
    for function in (shardwise.fully_shard, shardwise.replicate):
        chain, plain = twin("Chain", 6, 2)
        function(chain, mp_policy=policy)
        seen: list[torch.dtype] = []
        chain.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].dtype))
        pair = Pair(chain, plain, rank, world, shards=None if function is shardwise.fully_shard else 1)
        for step in range(4):
            chain_loss(chain, step, rank).backward()
            for each in range(world):
                low = copy.deepcopy(plain).to(torch.bfloat16)
                low.zero_grad()
                chain_loss(lambda x, low=low: low(x.bfloat16()).float(), step, each).backward()
                for mine, theirs in zip(plain.parameters(), low.parameters(), strict=True):
                    gradient = theirs.grad.float() / world
                    mine.grad = gradient if mine.grad is None else mine.grad + gradient
            pair.check(f"{function.__name__} in bfloat16, step {step}")
            pair.step()
        assert seen == 4 * [torch.bfloat16]
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            chain(torch.ones(2, 5))
        # A call of the C++ module itself is a direct one: each operation casts what it gets, the result is not cast.
        # While a call of the nn.Module runs, or if its failure was not seen, operations cast nothing.
        x = torch.ones(2, 6)
        assert (chain(x).dtype, chain.cpp_module(x).dtype) == (torch.float32, torch.bfloat16)


class TestStateAndPrecision:
    def test_whole_tensors_and_norms(self) -> None:
        run_ranks(2, check_state)

    def test_mixed_precision(self) -> None:
        run_ranks(2, check_precision)
