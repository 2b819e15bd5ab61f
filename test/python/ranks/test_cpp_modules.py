"""C++ modules that torch::python::bind_module made known: the C++ front end, driven from Python."""

from __future__ import annotations

import pytest
import torch
from bound import Pair, chain_loss, counted, stack_loss, twin, wrap_stack
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.cpp import ModuleWrapper

import shardwise


def check_training(rank: int) -> None:
    stack, plain = twin("Stack", 6, 2)
    wrap_stack(stack, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    before = counted(stack)["all_gathers"]
    Pair(stack, plain, stack_loss).train(range(4))
    # In forward and in backward, all three.
    assert counted(stack)["all_gathers"] - before == 4 * (3 + 3)
    stack, plain = twin("Stack", 6, 3)
    shardwise.fully_shard([stack.block(2), stack.block(0)], shard_placement_fn=last_dim)
    shardwise.fully_shard(stack)
    pair = Pair(stack, plain, stack_loss)
    pair.dims = {
        name: 1
        for name, parameter in plain.named_parameters()
        if name.startswith(("blocks.0", "blocks.2")) and parameter.dim() == 2
    }
    pair.train(range(4))
    assert counted(stack)["reduce_scatters"] == 8


def last_dim(parameter: torch.Tensor) -> Shard | None:
    return Shard(-1) if parameter.dim() > 1 else None


def check_accumulation(rank: int) -> None:
    for function in (shardwise.fully_shard, shardwise.replicate):
        stack, plain = twin("Stack", 6, 2)
        for module in (stack.block(0), stack.block(1), stack):
            assert function(module) is module
        assert isinstance(stack, shardwise.FSDPModule) and isinstance(stack, ModuleWrapper)
        replicates = function is shardwise.replicate
        assert isinstance(stack, shardwise.ReplicateModule) == replicates
        assert type(stack).__name__ == ("ReplicateStack" if replicates else "FSDPStack")
        pair = Pair(stack, plain, stack_loss, shards=1 if replicates else None)
        for step in range(4):
            stack.set_manual_backward_finalization(step >= 2)
            before = counted(stack)
            for part in range(3):
                # The flag reaches the blocks too, which are no nn.Modules.
                stack.set_requires_gradient_sync(part == 2 and step < 2)
                pair.backward(3 * step + part)
                if part < 2 or step >= 2:
                    assert all(parameter.grad is None for parameter in stack.parameters())
            if step >= 2:
                stack.set_requires_gradient_sync(True)
                stack.finalize_backward()
            assert sum(counted(stack)[name] - before[name] for name in ("reduce_scatters", "all_reduces")) == 3
            pair.step(f"{function.__name__}, step {step}")


def check_hybrid(rank: int) -> None:
    stack, plain = twin("Stack", 6, 2)
    wrap_stack(stack, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    Pair(stack, plain, stack_loss, shards=2).train(range(4))


class TestTraining:
    test_sharded = on_ranks(2, check_training)
    test_accumulated = on_ranks(2, check_accumulation)
    test_hybrid = on_ranks(4, check_hybrid)


def check_state(rank: int) -> None:
    stack, plain = twin("Stack", 6, 2)
    if rank == 1:
        # Everyone gets what rank 0 has.
        for parameter in stack.parameters():
            parameter.data.add_(1)
    wrap_stack(stack)
    pair = Pair(stack, plain, stack_loss)
    pair.train(range(2))
    kept = shardwise.cpp.full_state_dict(stack)
    assert_same_tensors(kept, plain.state_dict())
    assert (shardwise.cpp.full_state_dict(stack, rank0_only=True) == {}) == (rank > 0)

    pair.backward(7)
    total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    found = shardwise.cpp.clip_grad_norm_(stack, 0.01)
    torch.testing.assert_close(found.item(), total.item())
    pair.step("clipped")
    # Back to what was kept; the optimizer goes on with the same tensors.
    loaded = shardwise.cpp.load_full_state_dict(stack, kept if rank == 0 else {})
    assert (loaded.missing, loaded.unexpected) == ([], []) and loaded.elements == sum(t.numel() for t in kept.values())
    plain.load_state_dict(kept)
    pair.train(range(4))
    with pytest.raises(shardwise.Error, match=r"head\.weight"):
        shardwise.cpp.load_full_state_dict(stack, {name: t for name, t in kept.items() if name != "head.weight"})


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda text, n=name: f"{n}: {text}")


def check_precision(rank: int) -> None:
    """Parameters in bfloat16 compute, their gradients are summed in float."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
    )
    for function in (shardwise.fully_shard, shardwise.replicate):
        chain, _ = twin("Chain", 6, 2)
        function(chain, mp_policy=policy)
        seen: list[torch.dtype] = []
        chain.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].dtype))
        for step in range(2):
            chain_loss(chain, step, rank).backward()
            assert {(p.dtype, p.grad.dtype) for p in chain.parameters()} == {(torch.float32, torch.float32)}
        assert seen == 2 * [torch.bfloat16]
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            chain(torch.ones(2, 5))
        # A call of the C++ module itself is a direct one: each operation casts what it gets, the result is not cast.
        # While a call of the nn.Module runs, or if its failure was not seen, operations cast nothing.
        x = torch.ones(2, 6)
        assert (chain(x).dtype, chain.cpp_module(x).dtype) == (torch.float32, torch.bfloat16)


class TestStateAndPrecision:
    test_whole_tensors_and_norms = on_ranks(2, check_state)
    test_mixed_precision = on_ranks(2, check_precision)
