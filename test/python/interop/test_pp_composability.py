"""fully_shard() and replicate() in torch's pipelines: stages of units, with tensor parallelism, in checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine import TORCH, Engine, ours
from form import by_form
from models import local
from pipelines import (
    LAYERS,
    SCHEDULES,
    Chunk,
    Masters,
    Pipeline,
    SingleProcess,
    assert_equal,
    chunks_of,
    copies,
    data,
    full,
)
from pool import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = by_form(3, 5)
DTYPES = (torch.float32, torch.bfloat16)
T = TypeVar("T")


#: One stage a rank, and two of them with backwards in two parts.
SOME = by_form(["1F1B", "InterleavedZeroBubble"], list(SCHEDULES))


def combined(names: Sequence[str], others: Sequence[T]) -> list[tuple[str, T]]:
    """Every schedule with all of the others, or in the short form with one of them, in turns."""
    every = list(itertools.product(names, others))
    in_turns = [(name, others[i % len(others)]) for i, name in enumerate(names)]
    return by_form(in_turns, every)


def replicated(engine: Engine, chunks: list[Any], mesh: DeviceMesh, dtype: torch.dtype) -> list[Any]:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for chunk in chunks:
        for layer in chunk.layers.values():
            engine.replicate(layer, mesh=mesh, mp_policy=policy)
        engine.replicate(chunk, mesh=mesh, mp_policy=policy)
    return chunks


def sharded(engine: Engine, chunks: list[Any], mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> list[Any]:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for chunk in chunks:
        for layer in chunk.layers.values():
            engine.fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        engine.fully_shard(chunk, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return chunks


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, foreach=True)


def zero_grad(pipeline: Pipeline) -> None:
    for _, parameter in pipeline.parameters():
        parameter.grad = None


class ByHand:
    """The pipeline without data parallelism; its gradients are averaged over the replicas by hand."""

    def __init__(self, name: str, chunks: list[Any], mesh: DeviceMesh, dtype: torch.dtype) -> None:
        self._masters = [Masters(chunk, dtype) for chunk in chunks]
        self._pipeline = Pipeline(name, chunks, mesh["pp"], scale_grads=True)
        self._group, self._replicas = mesh["replicate"].get_group(), mesh["replicate"].size()
        self._dtype = dtype
        self._optimizer = optimizer_of([v for masters in self._masters for v in masters.values.values()])

    def step(self, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        for masters in self._masters:
            masters.refresh()
        losses = self._pipeline.step(x.to(self._dtype), target)
        for masters in self._masters:
            masters.collect(self._average)
        self._optimizer.step()
        return losses

    def _average(self, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient, group=self._group)
        return gradient / self._replicas


def replicate_pp(rank: int, names: list[str], dtypes: list[torch.dtype]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "pp"))
    replica, exact = mesh["replicate"].get_local_rank(), mesh["replicate"].size() == 2
    for name, dtype in combined(names, dtypes):
        plain = chunks_of(name, mesh["pp"], width=7)
        reference = ByHand(name, copies(plain), mesh, dtype)
        pipelines = [
            Pipeline(name, replicated(engine, copies(plain), mesh["replicate"], dtype), mesh["pp"], scale_grads=True)
            for engine in (ours(), TORCH)
        ]
        optimizers = [optimizer_of([p for _, p in pipeline.parameters()]) for pipeline in pipelines]
        for step in range(STEPS):
            where = f"{name} {dtype} rank {rank} step {step}"
            inputs = data(step, replica, width=7)
            wanted = reference.step(*inputs)
            mine, theirs = [pipeline.step(*inputs) for pipeline in pipelines]
            assert len(wanted) == len(mine) == len(theirs) == (4 if pipelines[0].is_last else 0), where
            for part, (a, b, c) in enumerate(zip(mine, theirs, wanted, strict=True)):
                assert_equal(a, b, f"{where}: loss {part} and torch's", dtype, exact)
                assert_equal(a, c, f"{where}: loss {part}", dtype, exact)
            compare(*pipelines, where, dtype, exact)
            pipelines[0].assert_computed_in(dtype)
            for pipeline, optimizer in zip(pipelines, optimizers, strict=True):
                optimizer.step()
                zero_grad(pipeline)


def compare(mine: Pipeline, theirs: Pipeline, where: str, dtype: torch.dtype, exact: bool = True) -> None:
    """What this rank has, in ours and in torch's engine."""
    for (name, a), (_, b) in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert isinstance(a, DTensor) and isinstance(a.grad, DTensor), f"{where}: {name}: {a.grad}"
        assert a.placements == b.placements == a.grad.placements, f"{where}: {name}: {a.placements}"
        assert_equal(local(a), local(b), f"{where}: {name} and torch's", dtype, exact)
        assert_equal(local(a.grad), local(b.grad), f"{where}: gradient of {name} and torch's", dtype, exact)


def replicate_pp_grads(rank: int, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pp"))
    for name, scale_grads in combined(names, (True, False)):
        chunks = replicated(ours(), chunks_of(name, mesh["pp"], width=6), mesh["replicate"], torch.float32)
        pipeline = Pipeline(name, chunks, mesh["pp"], scale_grads)
        reference = SingleProcess(6, torch.float32, replicas=2, scale_grads=scale_grads)
        assert all(p.placements == (Replicate(),) for _, p in pipeline.parameters())
        train_beside(pipeline, reference, mesh["replicate"].get_local_rank(), f"{name} scale={scale_grads} rank {rank}")


def train_beside(pipeline: Pipeline, reference: SingleProcess, replica: int, where: str) -> None:
    """Losses of the microbatches, gradients and values, step by step."""
    optimizer = optimizer_of([p for _, p in pipeline.parameters()])
    other = optimizer_of(list(reference.masters.values.values()))
    for step in range(STEPS):
        here = f"{where} step {step}"
        losses = pipeline.step(*data(step, replica, reference.width))
        wanted = reference.step(step)[replica]
        pipeline.assert_computed_in(reference.dtype)
        assert len(losses) == (len(wanted) if pipeline.is_last else 0), here
        for part, loss in enumerate(losses):
            assert_equal(loss, wanted[part], f"{here}: loss {part}", reference.dtype, exact=False)
        for name, parameter in pipeline.parameters():
            gradient = reference.masters.values[name].grad
            assert isinstance(parameter.grad, DTensor) and gradient is not None, f"{here}: {name}"
            assert_equal(full(parameter.grad), gradient, f"{here}: gradient of {name}", reference.dtype, exact=False)
        optimizer.step()
        other.step()
        for name, parameter in pipeline.parameters():
            value = reference.masters.values[name].detach()
            assert_equal(full(parameter).detach(), value, f"{here}: {name}", reference.dtype, exact=False)
        zero_grad(pipeline)


def three_dimensions(rank: int, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    split = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    replica = mesh["dp"].get_local_rank()
    for name, dtype in combined(names, DTYPES):
        where = f"{name} {dtype} rank {rank}"
        pipelines = []
        for engine in (ours(), TORCH):
            chunks = chunks_of(name, mesh["pp"], width=8)
            for layer in [layer for chunk in chunks for layer in chunk.layers.values()]:
                parallelize_module(layer, mesh["tp"], split)
            sharded(engine, chunks, mesh["dp"], dtype)
            pipelines.append(Pipeline(name, chunks, mesh["pp"], scale_grads=False))
        pipeline, theirs = pipelines
        # One step of both engines, then five of ours beside one process.
        start = [[local(p).detach().clone() for _, p in each.parameters()] for each in pipelines]
        for each in pipelines:
            each.step(*data(77, replica, width=8))
        compare(pipeline, theirs, where, dtype)
        for (_, p), value in zip(pipeline.parameters(), start[0], strict=True):
            assert torch.equal(local(p), value), f"{where}: a step of the pipeline alone changes no value"
        zero_grad(pipeline)
        train_beside(pipeline, SingleProcess(8, dtype, replicas=2, scale_grads=False), replica, where)


class Saved:
    """The chunks of a rank and their optimizers, as a checkpoint takes them: under names of the whole model."""

    def __init__(self, chunks: list[Any], optimizers: list[torch.optim.Optimizer]) -> None:
        self._parts = list(zip(chunks, optimizers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": {}, "optim": {}}
        for chunk, optimizer in self._parts:
            model, optim = get_state_dict(chunk, optimizer, options=FLAT)
            found["model"] |= model
            found["optim"] |= optim
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for chunk, optimizer in self._parts:
            model, optim = get_state_dict(chunk, optimizer, options=FLAT)
            set_state_dict(
                chunk,
                optimizer,
                model_state_dict={name: state["model"][name] for name in model},
                optim_state_dict={name: state["optim"][name] for name in optim},
                options=FLAT,
            )


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Training:
    """A pipeline and its optimizers. mode: how its chunks are wrapped, None for not at all."""

    def __init__(self, engine: Engine, mode: str | None, name: str, mesh: DeviceMesh) -> None:
        wrap = {"fully_shard": sharded, "replicate": replicated}.get(mode or "", lambda _, chunks, *rest: chunks)
        chunks = wrap(engine, chunks_of(name, mesh["pp"], width=5), mesh["dp"], torch.float32)
        self.pipeline = Pipeline(name, chunks, mesh["pp"], scale_grads=True)
        self.optimizers = [torch.optim.Adam(chunk.parameters(), lr=0.05) for chunk in chunks]
        self.saved = Saved(chunks, self.optimizers)
        self._replica = mesh["dp"].get_local_rank() if mode else 0

    def steps(self, numbers: range) -> list[torch.Tensor]:
        losses = []
        for step in numbers:
            losses += self.pipeline.step(*data(step, self._replica, width=5))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    def values(self) -> list[torch.Tensor]:
        """Parameters and the state of the optimizers, what this rank has of them."""
        tensors = [p.detach() for _, p in self.pipeline.parameters()]
        tensors += [
            t for o in self.optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)
        ]
        return [local(t).clone() for t in tensors]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def pp_and_dcp(rank: int, folder: str, mode: str | None, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    both_ways = mode == "fully_shard" or by_form(False, mode is not None)
    pairs = [(ours(), ours()), (ours(), TORCH), (TORCH, ours())] if both_ways else [(ours(), ours())]
    for name, (saver, loader) in itertools.product(names, pairs):
        where = f"{mode} {name} rank {rank}, from {saver.name} to {loader.name}"
        path = f"{folder}/{name}-{saver.name}-{loader.name}-{pairs.index((saver, loader))}"
        first = Training(saver, mode, name, mesh)
        first.steps(range(2))
        dcp.save({"app": first.saved}, checkpoint_id=path)
        then, full_then = first.values(), {n: full(p).detach().clone() for n, p in first.pipeline.parameters()}
        losses = first.steps(range(2, 4))

        second = Training(loader, mode, name, mesh)
        second.steps(range(7, 8))
        assert not same(second.values(), then), where
        state = {"app": second.saved}
        dcp.load(state, checkpoint_id=path)
        names_there = set(second.saved.state_dict()["model"])
        assert names_there == {n for n, _ in second.pipeline.parameters()}, f"{where}: {names_there}"
        assert same(second.values(), then), f"{where}: what was loaded"
        assert same(second.steps(range(2, 4)), losses), f"{where}: losses afterwards"
        assert same(second.values(), first.values()), f"{where}: values afterwards"

        # One process reads it without ranks, into a model that nobody wrapped.
        whole = Chunk(5, range(LAYERS))
        plain = {"app": {"model": whole.state_dict()}}
        dcp.load(plain, checkpoint_id=path, no_dist=True)
        for key, value in full_then.items():
            assert torch.equal(plain["app"]["model"][key], value), f"{where}: {key} read by one process"


class TestComposability:
    @pytest.mark.parametrize("mode", [None, "fully_shard", "replicate"])
    def test_pp_and_dcp(self, tmp_path: Path, mode: str | None) -> None:
        run_ranks(
            4, pp_and_dcp, str(tmp_path), mode, by_form(["InterleavedZeroBubble"], ["GPipe", "InterleavedZeroBubble"])
        )

    def test_3d_with_tp_dp_pp(self) -> None:
        run_ranks(8, three_dimensions, SOME, timeout=300)

    def test_replicate_pp(self) -> None:
        run_ranks(4, replicate_pp, SOME, list(DTYPES))

    def test_replicate_pp_grads(self) -> None:
        run_ranks(4, replicate_pp_grads, SOME)
