"""Tensor and pipeline parallelism of C++ modules, driven from Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bound import Pair, models, stack_loss, twin, wrap_stack
from models import assert_close, batch, local, step_all
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import cpp

PLAN = {
    "embedding": cpp.vocabulary(),
    "blocks.*.up": cpp.colwise(),
    "blocks.*.down": cpp.rowwise(),
    "head": cpp.colwise(gather_output=True),
}


def torchs_plan(depth: int) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(depth):
        plan[f"blocks.{index}.up"], plan[f"blocks.{index}.down"] = ColwiseParallel(), RowwiseParallel()
    return plan


def check_bits(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    bound, plain = twin("Stack", 8, 2)
    parallel = cpp.parallelize(bound, mesh, PLAN)
    parallelize_module(plain, mesh, torchs_plan(2))
    assert "embedding.weight: [11, 8], here [6, 8]" in parallel.table() or rank == 1
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3, momentum=0.9) for each in (bound, plain)]
    for step in range(4):
        # torch adds it on the first rank, before the sum over ranks, and we add it after: other bits.
        with torch.no_grad():
            for name, parameter in [*bound.named_parameters(), *plain.named_parameters()]:
                if name.endswith("down.bias"):
                    local(parameter).zero_()
        losses = [stack_loss(model, step, 0) for model in (bound, plain)]
        assert torch.equal(local(losses[0]), local(losses[1]))
        for loss in losses:
            loss.backward()
        theirs: dict[str, Any] = dict(plain.named_parameters())
        for name, mine in bound.named_parameters():
            assert torch.equal(mine.detach(), local(theirs[name])), name
            gradient = theirs[name].grad
            if isinstance(gradient, DTensor):  # That of the table is whole on each rank.
                gradient = gradient.redistribute(placements=theirs[name].placements)
            assert torch.equal(local(mine.grad), local(gradient)), f"the gradient of {name}"
        step_all(optimizers)
    # For each step: three layers of rows (one of a vocabulary) and the two of columns in blocks; the head's gather and
    # the sum of its input's gradient.
    counted = parallel.counters()
    assert (counted["all_reduces"], counted["all_gathers"]) == (4 * 6, 4)


def check_with_shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    bound, plain = twin("Stack", 8, 2)
    cpp.parallelize(bound, mesh["tp"], PLAN)
    wrap_stack(bound, mesh=mesh["dp"])
    pair = Pair(bound, plain, stack_loss, place=(mesh["dp"].get_local_rank(), 2))
    for step in range(4):
        pair.backward(step)
        step_all(pair.optimizers)
    whole = cpp.full_state_dict(bound)
    for name, values in plain.state_dict().items():
        assert_close(whole[name], values, name)


def check_hooks(rank: int) -> None:
    """Python's first register_hook() on a tensor clears the hooks that C++ left there."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    bound, plain = (models().Stack(8, 1).block(0) for _ in range(2))
    seen: list[str] = []
    parameters = dict(bound.named_parameters())
    parameters["up.weight"].register_hook(lambda gradient: seen.append("before"))
    parameters["norm.weight"].register_hook(lambda gradient: gradient * 2)
    plan = {"norm": cpp.sequence(), "up": cpp.colwise(sequence_dim=0), "down": cpp.rowwise(sequence_dim=0)}
    cpp.parallelize(bound, mesh, plan)
    parameters["up.weight"].register_hook(lambda gradient: seen.append("after"))
    parameters["norm.bias"].register_hook(lambda gradient: seen.append("bias"))
    whole = torch.cat([batch(0, 0, 8), batch(0, 1, 8)])
    bound(whole.chunk(2)[rank], 0.5).pow(2).sum().backward()
    plain(whole, 0.5).pow(2).sum().backward()
    assert sorted(seen) == ["after", "before", "bias"]
    expected = dict(plain.named_parameters())
    for name, factor in (("norm.weight", 2), ("norm.bias", 1)):
        assert_close(local(parameters[name].grad), factor * local(expected[name].grad), name)
    piece = local(expected["up.weight"].grad).chunk(2)[rank]
    assert_close(local(parameters["up.weight"].grad), piece, "up.weight")


def check_misuse(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = models().Stack(8, 2)
    with pytest.raises(ValueError, match=r"'heads\.\*'"):
        cpp.parallelize(model, mesh["tp"], {"heads.*": cpp.colwise()})
    with pytest.raises(ValueError, match=r"the axes dp, tp\. Pass one of them, such as mesh\['tp'\]"):
        cpp.parallelize(model, mesh, PLAN)
    with pytest.raises(TypeError, match="expected a C\\+\\+ module"):
        cpp.parallelize(nn.Linear(2, 2), mesh["tp"], PLAN)
    with pytest.raises(ValueError, match="it must be one of GPipe, 1F1B, Interleaved1F1B"):
        cpp.Pipeline(mesh["tp"], lambda stage: model, cpp.PipelineOptions(2, schedule="2F2B"))
    cpp.parallelize(model, mesh, PLAN, axis="tp")
    with pytest.raises(shardwise.Error, match="'head.weight'"):
        dict(model.named_parameters())["head.weight"].sum()


def chain(stage: int) -> Any:
    model = models().Chain(6, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * stage)
    return model


def mean_square(outputs: list[torch.Tensor], targets: list[torch.Tensor]) -> torch.Tensor:
    return (outputs[0] - targets[0]).pow(2).mean()


def rows_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([batch(step, part, 6) for part in range(4)]), torch.cat([batch(step, 9 + k, 6) for k in range(4)])


def check_pipeline(rank: int, schedule: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    own: dict[int, Any] = {}

    def make(stage: int) -> Any:
        own[stage] = chain(stage)
        shardwise.fully_shard(own[stage], mesh=mesh["dp"])
        # As a module, and as a function.
        return own[stage] if stage % 2 else (lambda x: own[stage](x), own[stage])

    pipeline = cpp.Pipeline(mesh["pp"], make, cpp.PipelineOptions(4, mean_square, schedule))
    assert pipeline.own_stages == sorted(own) and f"{pipeline.stages - 1}" in pipeline.table()
    is_last = pipeline.stages - 1 in own
    inputs, targets = rows_of(mesh["dp"].get_local_rank())
    losses = pipeline.step(inputs, targets)
    assert all(parameter.grad is not None for model in own.values() for parameter in model.parameters())
    result = pipeline.evaluate(inputs, targets)
    outputs = inputs
    for stage in range(pipeline.stages):
        outputs = chain(stage)(outputs)
    if is_last:
        torch.testing.assert_close(result.outputs[0], outputs.detach())
        for found in (losses, result.losses):
            assert len(found) == 4
            torch.testing.assert_close(torch.stack(found).mean(), mean_square([outputs], [targets]).detach())
    # An error of a function of Python's is one on all ranks of the pipeline.
    with pytest.raises(shardwise.Error, match=r"a step failed on all ranks(.|\n)*size of tensor"):
        pipeline.step(inputs, targets.new_zeros(len(targets), 5) if is_last else ())
    pipeline.step(inputs, targets)


class Scale(torch.autograd.Function):
    """Of Python's, which computes both gradients each time it is asked for one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, factor = ctx.saved_tensors
        return gradients[0] * factor, (gradients[0] * x).sum(0)


class Mixed:
    """A stage of a C++ module inside of a checkpoint, and what Python adds: a function, a hook, a gradient."""

    def __init__(self, stage: int) -> None:
        self.module = chain(stage)
        self.factor = torch.full((6,), 1.1, requires_grad=True)
        self.kept: list[torch.Tensor] = []
        self.hooked = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scaled = Scale.apply(x, self.factor)
        scaled.retain_grad()
        scaled.register_hook(self.hook)
        self.kept.append(scaled)
        return checkpoint(self.module, scaled, use_reentrant=False)

    def hook(self, gradient: torch.Tensor) -> torch.Tensor:
        self.hooked += 1
        return gradient * 1.5

    def parameters(self) -> list[torch.Tensor]:
        return [self.factor, *self.module.parameters()]


def check_mixed(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    own: dict[int, Mixed] = {}

    def make(stage: int) -> Any:
        own[stage] = Mixed(stage)
        return own[stage], own[stage].module

    pipeline = cpp.Pipeline(mesh, make, cpp.PipelineOptions(4, mean_square, "ZBVZeroBubble"))
    whole = [Mixed(stage) for stage in range(pipeline.stages)]
    for step in range(3):
        inputs, targets = rows_of(step)
        pipeline.step(inputs, targets)
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            for each in whole:
                x = each(x)
            (mean_square([x], [y]) / 4).backward()
        for stage, mine in own.items():
            theirs = whole[stage]
            assert mine.hooked == theirs.hooked == 4 * (step + 1)
            for a, b in zip([*mine.parameters(), *mine.kept], [*theirs.parameters(), *theirs.kept], strict=True):
                torch.testing.assert_close(a.grad, b.grad)
        for each in (*own.values(), *whole):
            for parameter in each.parameters():
                parameter.data.sub_(0.1 * parameter.grad)
                parameter.grad = None
            each.kept.clear()


class TestParallelize:
    test_bit_for_bit_as_torchs = on_ranks(2, check_bits)
    test_with_shards = on_ranks(4, check_with_shards)
    test_hooks_of_python = on_ranks(2, check_hooks)
    test_misuse_is_an_error = on_ranks(2, check_misuse)


class TestPipeline:
    test_functions_and_modules = on_ranks(4, check_pipeline, each=["1F1B", "ZBVZeroBubble"])
    test_what_python_adds_to_a_stage = on_ranks(2, check_mixed)
