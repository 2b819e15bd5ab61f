"""Parameters that gather themselves (fsdp_pre_all_gather, fsdp_post_all_gather), beside torch's engine."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from engine import TORCH, ours
from models import Beside, batch, mlp, step_all
from own_gather import HalfTwin, NewTwin, OddTwin, OldTwin, ScarceTwin, Twin, with_twins
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardwise


def wrapped(engine: Any, model: nn.Module, **options: Any) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    engine.fully_shard(model[0], **options)
    engine.fully_shard(model, **options)
    return model


def own(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    return local.first if isinstance(local, Twin) else local


def same_training(rank: int, models: list[nn.Module]) -> None:
    """Both models bit for bit, their shards and gradients too."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in models]
    for number in range(3):
        losses = [model(batch(number, rank, 5)).float().pow(2).mean() for model in models]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses), f"losses of step {number}: {losses}"
        pairs = list(zip(models[0].named_parameters(), models[1].parameters(), strict=True))
        for (name, p), q in pairs:
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(own(p.grad), own(q.grad)), f"gradient of {name} at step {number}"
        step_all(optimizers)
        for (name, p), q in pairs:
            assert torch.equal(own(p.detach()), own(q.detach())), f"{name} after step {number}"


def trained_as_torch(rank: int) -> None:
    halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    choices: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}, {"mp_policy": halves}]
    for kind, width in ((OldTwin, 8), (NewTwin, 7)):
        for options in choices:
            model = mlp(5, width, 4)
            both = [wrapped(engine, with_twins(copy.deepcopy(model), kind), **options) for engine in (ours(), TORCH)]
            same_training(rank, both)


def replicated(rank: int) -> None:
    """Without torch's engine, whose replicate() cannot do it: beside a model of ordinary parameters."""
    plain = mlp(5, 7, 3)
    both = Beside(with_twins(copy.deepcopy(plain), OldTwin), shardwise.replicate, plain=plain)
    for number in range(4):
        both.backward(number)
        for (name, p), q in zip(both.model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own(p.grad), q.grad, msg=f"gradient of {name} at step {number}")
        step_all(both.optimizers)


def methods_put_on_shards(rank: int) -> None:
    """After to_empty() the shards are new tensors, which get the methods one by one."""
    calls = []

    def of(shard: torch.Tensor) -> Any:
        def before(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
            calls.append("before")
            return (shard * 2,), 0.5

        return before

    def after(outputs: Any, metadata: float, param_dtype: Any, *, out: Any = None) -> Any:
        (whole,) = outputs
        calls.append("after")
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole * metadata)
            return None
        made = whole * metadata
        return made, (made,)

    reference = mlp(5, 8, 4)
    models = []
    for engine in (ours(), TORCH):
        with torch.device("meta"):
            model = mlp(5, 8, 4)
        wrapped(engine, model)
        model.to_empty(device="cpu")
        for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            shard: Any = parameter._local_tensor
            shard.copy_(whole.detach().chunk(2)[rank])

            shard.fsdp_pre_all_gather = of(shard)
            shard.fsdp_post_all_gather = after
        models.append(model)
    same_training(rank, models)
    assert calls.count("before") == calls.count("after") > 0


def wrong(rank: int) -> None:
    for kind, words in (
        (HalfTwin, "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined"),
        (OddTwin, "Invalid fsdp_pre_all_gather"),
    ):
        model = with_twins(mlp(5, 8, 4), kind)
        before = dict(model.named_parameters())
        with pytest.raises(AssertionError, match=words):
            ours().fully_shard(model).unshard()
        if ours() is not TORCH:
            assert all(before[name] is p for name, p in model.named_parameters())
    model = ours().fully_shard(with_twins(mlp(5, 7, 4), ScarceTwin))
    if rank == 1:
        with pytest.raises(AssertionError, match=r"padded sharded size.*got \[torch.Size\(\[3, 5\]\)"):
            model.unshard()


class KnownTwin(OldTwin):
    """Whoever made it knows it, with what it holds."""

    made: ClassVar[list[Twin]] = []

    def fsdp_post_all_gather(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        result = super().fsdp_post_all_gather(*args, out=out, **kwargs)
        if result is not None:
            self.made.append(result[0])
        return result


def freed_with_the_unit(rank: int) -> None:
    """Where values are cast, what it makes is in memory beside that of the gather."""
    for engine in (TORCH, ours()):
        for kind in (None, torch.bfloat16):
            KnownTwin.made.clear()
            model: Any = with_twins(mlp(5, 8, 8, 4), KnownTwin)
            policy = MixedPrecisionPolicy(param_dtype=kind)
            for module in (model[0], model[2], model):
                engine.fully_shard(module, mp_policy=policy)
            during: list[int] = []
            model[0].register_forward_hook(lambda *_, d=during: d.append(memory_of(KnownTwin.made[1])), prepend=True)
            for number in range(3):
                loss = model(batch(number, rank, 5)).float().pow(2).mean()
                # The root is gathered first, and keeps what it gathered.
                where = f"{engine.name}, {kind}, step {number}"
                assert [memory_of(made) > 0 for made in KnownTwin.made] == [True, False, False], where
                loss.backward()
                assert [memory_of(made) for made in KnownTwin.made] == [0, 0, 0], where
            assert len(during) == 3 and all(during)


def memory_of(twin: Twin) -> int:
    return sum(part.untyped_storage().nbytes() for part in (twin.first, twin.second))


class TestFullyShardExtensions:
    test_trained_as_torch = on_ranks(2, trained_as_torch)
    test_replicated = on_ranks(2, replicated)
    test_freed_with_the_unit = on_ranks(2, freed_with_the_unit)
    test_methods_put_on_shards = on_ranks(2, methods_put_on_shards)
    test_wrong = on_ranks(2, wrong)
