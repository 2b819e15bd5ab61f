"""Tools around wrapped models: compilers, profilers, counters, logs, processes and threads, other wrappers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from engine import TORCH, Engine, ours
from layouts import by_layer
from models import Beside, batch
from parity import Parity, Program, Wrap, assert_same_bits
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training_models import mlp_program, mlps, non_root_program


class Graphs:
    """A backend of torch.compile that notes the operations of each graph, and runs them as they are."""

    def __init__(self) -> None:
        self.operations: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.operations.append([str(node.target) for node in module.graph.nodes if node.op.startswith("call")])
        return module.forward


def compiled(rank: int) -> None:
    parity = Parity(non_root_program())

    def wrapping(name: str, backend: Any) -> Wrap:
        def wrap(engine: Engine, model: Any) -> None:
            torch._dynamo.reset()
            for child in model:
                getattr(engine, name)(child)
                child.compile(backend=backend)
            getattr(engine, name)(model)

        return wrap

    for name in ("fully_shard", "replicate"):
        traces, graphs = [], []
        for engine in (TORCH, ours()):
            seen = Graphs()
            traces += [parity.run(engine, wrapping(name, backend)) for backend in (seen, "aot_eager")]
            graphs.append(seen.operations)
        for trace in traces[1:]:
            assert_same_bits(trace, traces[0])
        # What is between the hooks is one graph, as with torch's: for inputs with gradients and without, made once.
        assert graphs[1] == graphs[0]
        assert [len(operations) for operations in graphs[1]] == [4, 4], graphs[1]


def labels_of(engine: Engine, layout: str, rank: int) -> Counter[str]:
    model = mlp_program((5, 7, 3, 1)).make()
    by_layer(layout)(engine, model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for step in range(2):
            model(batch(step, rank, 5)).sum().backward()
    return Counter(event.name for event in profiler.events() if event.name.startswith("FSDP::"))


def labelled(rank: int, layout: str) -> None:
    theirs, mine = (labels_of(engine, layout, rank) for engine in (TORCH, ours()))
    gathers = ("all_gather", "all_gather_copy_out")
    others = ("pre_forward", "post_forward", "pre_backward", "post_backward_reduce")
    # torch's replicate() has the labels of gathers where it copies parameters.
    kinds = [f"FSDP::{kind}" for kind in (others if layout == "replicate" else gathers + others)]
    expected, found = (
        {label: count for label, count in labels.items() if label.split(" ")[0] in kinds} for labels in (theirs, mine)
    )
    assert len(expected) == 3 * len(kinds) and found == expected, f"{found} for {expected}"


def mixed_trees(rank: int) -> None:
    def under_sharded(engine: Engine, model: Any) -> None:
        engine.fully_shard(model[0].in_proj)
        engine.replicate(model[0])
        engine.replicate(model[1].out_proj)
        engine.fully_shard(model[1])
        engine.fully_shard(model)
        assert sharded_of(model) == {"0.in_proj", "1.in_proj", "2.in_proj", "2.out_proj"}

    def under_replicated(engine: Engine, model: Any) -> None:
        engine.fully_shard(model[0].in_proj)
        engine.fully_shard(model[1])
        engine.replicate(model[2].out_proj)
        engine.replicate(model)
        assert sharded_of(model) == {"0.in_proj", "1.in_proj", "1.out_proj"}

    program = Program(lambda: mlps(8, 3), lambda model, number, r: model(batch(number, r, 8)).pow(2).mean(), steps=4)
    parity = Parity(program)
    for wrap in (under_sharded, under_replicated):
        parity.both(wrap)


def sharded_of(model: nn.Module) -> set[str]:
    """The layers that lie in shards."""
    parameters: Any = model.named_parameters()
    return {name.rpartition(".")[0] for name, parameter in parameters if parameter.placements[0].is_shard()}


def around_an_ignored_part(rank: int) -> None:
    def wrap(model: Any) -> None:
        ignored = set(model[1].parameters())
        for module in (model[0], model):
            ours().fully_shard(module, ignored_params=ignored)
        sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
        assert len(sharded) == 8 and not any(name.startswith("1.") for name in sharded)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
        around.append(DistributedDataParallel(model))

    def loss(model: Any, step: int, data_rank: int) -> torch.Tensor:
        return (around[0] if model is both.model else model)(batch(step, data_rank, 4)).pow(2).sum()

    around: list[nn.Module] = []
    both = Beside(mlps(4, 3), wrap, loss)
    both.train(range(4))


class TestInteropCompile:
    test_each_module = on_ranks(2, compiled, timeout=300)


class TestInteropObservers:
    test_labels_in_a_profile = on_ranks(2, labelled, each=["fully_shard", "replicate"])


class TestInteropTrees:
    test_replicated_and_sharded_parts = on_ranks(2, mixed_trees)
    test_ddp_around_an_ignored_part = on_ranks(2, around_an_ignored_part)
