"""fully_shard() and replicate() in torch's pipelines: stages of units, with tensor parallelism, in checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine import TORCH, Engine, ours
from models import Block, assert_close, batch, local, step_all, whole
from parity import adam
from pool import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

#: The schedule and how many stages a rank has.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "1F1B": (schedules.Schedule1F1B, 1),
    "InterleavedZeroBubble": (schedules.ScheduleInterleavedZeroBubble, 2),
    "Interleaved1F1B": (schedules.ScheduleInterleaved1F1B, 2),
}
#: One stage a rank, and two of them with backwards in two parts.
SOME = ["1F1B", "InterleavedZeroBubble"]
DTYPES = [torch.float32, torch.bfloat16]
#: Torch up to 2.14 adds the gradients of a backward in two parts up in the parameters' 16 bits; see docs/versions.md.
EXACT = DTYPES if hasattr(FSDPParam, "unsharded_grad_dtype") else [torch.float32]
LAYERS, MICROBATCHES, STEPS = 4, 4, 3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Chunk(nn.Module):
    """Some layers of the model, each under its name in the whole."""

    def __init__(self, width: int, layers: Iterable[int] = range(LAYERS)) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for layer in layers:
            torch.manual_seed(100 + layer)
            self.layers[str(layer)] = Block(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target.float()).pow(2).mean()


def data(step: int, replica: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a replica, for all of its microbatches."""
    return batch(step, replica, width, 2 * MICROBATCHES), batch(step + 500, replica, width, 2 * MICROBATCHES)


class Pipeline:
    """A rank of a pipeline, which wraps the chunks of the model that it has; and what a checkpoint takes of it."""

    def __init__(
        self, name: str, mesh: DeviceMesh, width: int, wrap: Callable[[Chunk], Any], scale_grads: bool = True
    ) -> None:
        schedule, per_rank = SCHEDULES[name]
        numbers, total = (
            [mesh.get_local_rank() + part * mesh.size() for part in range(per_rank)],
            per_rank * mesh.size(),
        )
        each = LAYERS // total
        self.chunks = [Chunk(width, range(number * each, (number + 1) * each)) for number in numbers]
        for chunk in self.chunks:
            wrap(chunk)
        stages = [
            PipelineStage(chunk, number, total, torch.device("cpu"), group=mesh.get_group())
            for chunk, number in zip(self.chunks, numbers, strict=True)
        ]
        self.width, self.is_first, self.is_last = width, stages[0].is_first, stages[-1].is_last
        given: Any = stages[0] if per_rank == 1 else stages
        self.schedule = schedule(given, MICROBATCHES, loss_fn=loss_of, scale_grads=scale_grads)
        self.optimizers = [adam(chunk) for chunk in self.chunks]

    def parameters(self) -> dict[str, Any]:
        return {name: p for chunk in self.chunks for name, p in chunk.named_parameters()}

    def backward(self, step: int, replica: int) -> list[torch.Tensor]:
        """The losses of the microbatches, where the last stage is."""
        x, target = data(step, replica, self.width)
        losses: list[torch.Tensor] = []
        wanted: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
        self.schedule.step(*[x][: self.is_first], **wanted)
        return [loss.detach() for loss in losses]

    def step(self) -> None:
        step_all(self.optimizers)

    def train(self, numbers: range, replica: int) -> list[torch.Tensor]:
        losses = []
        for number in numbers:
            losses += self.backward(number, replica)
            self.step()
        return losses

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and the state of the optimizers, what this rank has of them."""
        states = [t for one in self.optimizers for entry in one.state.values() for t in entry.values()]
        return [local(each).clone() for each in (*self.parameters().values(), *states)]

    def state_dict(self) -> dict[str, Any]:
        """Under names of the whole model."""
        found: dict[str, Any] = {"model": {}, "optim": {}}
        for chunk, optimizer in zip(self.chunks, self.optimizers, strict=True):
            model, optim = get_state_dict(chunk, optimizer, options=FLAT)
            found = {"model": found["model"] | model, "optim": found["optim"] | optim}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for chunk, optimizer in zip(self.chunks, self.optimizers, strict=True):
            model, optim = get_state_dict(chunk, optimizer, options=FLAT)
            values = {name: state["model"][name] for name in model}
            states = {name: state["optim"][name] for name in optim}
            set_state_dict(chunk, optimizer, model_state_dict=values, optim_state_dict=states, options=FLAT)


def units(function: str, engine: Engine, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> Callable[..., None]:
    """A unit for each layer, and one for the rest."""
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    if function == "fully_shard":
        options["reshard_after_forward"] = False

    def wrap(chunk: Chunk) -> None:
        for part in (*chunk.layers.values(), chunk):
            getattr(engine, function)(part, mesh=mesh, **options)

    return wrap


def compare(mine: Pipeline, theirs: Pipeline, what: str, exact: bool) -> None:
    """What this rank has, in ours and in torch's engine."""
    others = theirs.parameters()
    for name, a in mine.parameters().items():
        b = others[name]
        assert isinstance(a, DTensor) and isinstance(a.grad, DTensor), f"{what}: {name}: {a.grad}"
        assert a.placements == b.placements == a.grad.placements, f"{what}: {name}: {a.placements}"
        for one, other in ((a, b), (a.grad, b.grad)):
            if exact:
                assert torch.equal(local(one), local(other)), f"{what}: {name}: {one} for {other}"
            torch.testing.assert_close(local(one), local(other), rtol=1e-2, atol=1e-2)


def replicate_pp(rank: int, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "pp"))
    replica = mesh["replicate"].get_local_rank()
    for name, dtype in zip(names, DTYPES, strict=False):
        exact = mesh["replicate"].size() == 2 and dtype in EXACT
        mine, theirs = (
            Pipeline(name, mesh["pp"], 7, units("replicate", engine, mesh["replicate"], dtype))
            for engine in (ours(), TORCH)
        )
        for step in range(STEPS):
            losses = [pipeline.backward(step, replica) for pipeline in (mine, theirs)]
            assert len(losses[0]) == (MICROBATCHES if mine.is_last else 0)
            assert not exact or all(map(torch.equal, *losses)), f"{name}, step {step}: {losses}"
            compare(mine, theirs, f"{name} {dtype} rank {rank} step {step}", exact)
            for pipeline in (mine, theirs):
                pipeline.step()


def train_beside_one_process(pipeline: Pipeline, replica: int, where: str, scale: float) -> None:
    """Losses of the microbatches, gradients and values, step by step. There are two replicas."""
    plain = Chunk(pipeline.width)
    optimizer = adam(plain)
    for step in range(STEPS):
        losses, wanted = pipeline.backward(step, replica), []
        for number in range(2):
            for x, target in zip(
                *(each.chunk(MICROBATCHES) for each in data(step, number, pipeline.width)), strict=True
            ):
                loss = loss_of(plain(x), target)
                (loss * scale / 2).backward()
                wanted += [loss.detach()] if number == replica else []
        if pipeline.is_last:
            torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)
        for name, parameter in pipeline.parameters().items():
            other = plain.get_parameter(name)
            assert_close(whole(parameter.grad), other.grad, f"{where}, step {step}: the gradient of {name}")
        pipeline.step()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in pipeline.parameters().items():
            assert_close(whole(parameter), plain.get_parameter(name).detach(), f"{where}, step {step}: {name}")


def replicate_pp_grads(rank: int, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pp"))
    for name, scale_grads in zip(names, (True, False), strict=True):
        pipeline = Pipeline(name, mesh["pp"], 6, units("replicate", ours(), mesh["replicate"]), scale_grads)
        where, scale = f"{name} scale={scale_grads} rank {rank}", 1 / MICROBATCHES if scale_grads else 1.0
        train_beside_one_process(pipeline, mesh["replicate"].get_local_rank(), where, scale)


def three_dimensions(rank: int, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    replica = mesh["dp"].get_local_rank()

    def split(engine: Engine) -> Callable[[Chunk], None]:
        def wrap(chunk: Chunk) -> None:
            for layer in chunk.layers.values():
                parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            units("fully_shard", engine, mesh["dp"])(chunk)

        return wrap

    for name in names:
        mine, theirs = (Pipeline(name, mesh["pp"], 8, split(engine)) for engine in (ours(), TORCH))
        for pipeline in (mine, theirs):
            pipeline.backward(77, replica)
        compare(mine, theirs, f"{name} rank {rank}", exact=True)
        for pipeline in (mine, theirs):
            for optimizer in pipeline.optimizers:
                optimizer.zero_grad()
        train_beside_one_process(mine, replica, f"{name} rank {rank}", 1 / MICROBATCHES)


def same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def pp_and_dcp(rank: int, function: str, names: list[str], folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    pairs = [(ours(), ours()), (ours(), TORCH), (TORCH, ours())] if function == "fully_shard" else [(ours(), ours())]
    for name, (number, (saver, loader)) in itertools.product(names, enumerate(pairs)):
        where = f"{function} {name} rank {rank}, from {saver.name} to {loader.name}"
        first, second = (
            Pipeline(name, mesh["pp"], 5, units(function, engine, mesh["dp"])) for engine in (saver, loader)
        )
        first.train(range(2), replica)
        path = f"{folder}/{name}-{number}"
        dcp.save({"app": first}, checkpoint_id=path)
        then, full_then = first.tensors(), {name: whole(p).clone() for name, p in first.parameters().items()}
        losses = first.train(range(2, 4), replica)

        second.train(range(7, 8), replica)
        assert not same(second.tensors(), then), where
        dcp.load({"app": second}, checkpoint_id=path)
        assert second.state_dict()["model"].keys() == second.parameters().keys(), where
        assert same(second.tensors(), then), f"{where}: what was loaded"
        assert same(second.train(range(2, 4), replica), losses), f"{where}: losses afterwards"
        assert same(second.tensors(), first.tensors()), f"{where}: values afterwards"

        # One process reads it without ranks, into a model that nobody wrapped.
        plain = {"app": {"model": Chunk(5).state_dict()}}
        dcp.load(plain, checkpoint_id=path, no_dist=True)
        for key, value in full_then.items():
            assert torch.equal(plain["app"]["model"][key], value), f"{where}: {key} read by one process"


class TestComposability:
    test_pp_and_dcp = on_ranks(4, pp_and_dcp, SOME[1:], each=["fully_shard", "replicate"], path=".")
    test_3d_with_tp_dp_pp = on_ranks(8, three_dimensions, SOME, timeout=300)
    test_replicate_pp = on_ranks(4, replicate_pp, SOME)
    test_replicate_pp_grads = on_ranks(4, replicate_pp_grads, SOME)
