"""What the rows of fully_shard_training and replicate_training check in the same way; `function` is the name of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from delays import POINTS, Delays
from engine import TORCH, Engine, ours
from form import by_form
from language import text_program, wrap_blocks
from models import local
from parity import Parity, Program, Trace, Wrap, Wrapping, adam, assert_same_bits
from registration import TwoMlps
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from training_models import batch_for, mlps


def is_exact() -> bool:
    """Two summands have one sum."""
    return dist.get_world_size() == 2


def by_block(function: str, **options: Any) -> Wrap:
    return lambda engine, model: wrap_blocks(model, lambda part: getattr(engine, function)(part, **options))


def by_child(function: str, **options: Any) -> Wrap:
    """Each child of a model, then the model."""

    def wrap(engine: Engine, model: Any) -> None:
        for module in (*model.children(), model):
            getattr(engine, function)(module, **options)

    return wrap


def assert_late_ranks_change_nothing(parity: Parity, wrap: Wrap, in_time: Trace) -> None:
    one_by_one = [[point] for point in POINTS] if is_exact() else []
    for points in [*by_form([], one_by_one), POINTS]:
        delays = Delays(*points)
        late = parity.run(ours(), delays.wrapping(wrap))
        delays.assert_passed(parity.program.steps)
        assert_same_bits(late, in_time)


def assert_offloading_changes_nothing(function: str) -> None:
    # On a mesh of CPUs nothing is moved: what there is to see is that all of it is where it should be.
    def on_the_host(model: Any, part: int) -> None:
        for parameter in model.parameters():
            assert local(parameter).is_cpu and parameter.is_cpu
            assert parameter.grad is None or local(parameter.grad).is_cpu

    parity = Parity(text_program())
    theirs = parity.run(TORCH, by_block(function, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    for pin in (False, True):
        # torch pins by an accelerator, and without one cannot.
        if pin and ours().name == "torch" and not torch.cuda.is_available():
            continue
        wrap = by_block(function, offload_policy=CPUOffloadPolicy(pin_memory=pin))
        assert_same_bits(parity.run(ours(), Wrapping(wrap, before=on_the_host, after=on_the_host)), theirs)
        late = parity.run(ours(), Delays(*POINTS).wrapping(wrap))
        assert_same_bits(late, theirs)


def set_optimizer_event(model: Any) -> None:
    cuda = model.tokens.weight.device.type == "cuda"
    model.set_post_optim_event(torch.cuda.current_stream().record_event() if cuda else torch.cpu.Event())


def assert_registered_after_backward(two_mlps: Callable[[Engine], TwoMlps], what: str) -> None:
    """After each backward the parameters are the sharded ones, with gradients, and torch's look the same."""
    seen = []
    for engine in (TORCH, ours()):
        both = two_mlps(engine)
        for step in range(3):
            both.assert_sharded()
            both.backward(step)
            both.assert_sharded()
            both.assert_gradients()
        seen.append(both.look())
    assert seen[0] == seen[1], what


def assert_trains_in_float64(wrap: Wrap, swap: bool) -> None:
    """After a cast of the wrapped model; `swap` is how torch lets a cast change a parameter."""

    def wrap_and_cast(engine: Engine, model: Any) -> None:
        wrap(engine, model)
        before = list(model.parameters())
        assert model.to(torch.float64) is model
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert all(p.dtype == torch.float64 for p in before)

    def loss(model: nn.Module, number: int, data_rank: int) -> torch.Tensor:
        return model(batch_for(model, number, data_rank, 4)).pow(2).sum()

    torch.__future__.set_swap_module_params_on_conversion(swap)
    mine = Parity(Program(lambda: mlps(4, 2), loss, optimizer=adam), dtype=torch.float64).both(wrap_and_cast)
    gradients = [p.grad for p in mine.model.parameters()]
    assert all(g.dtype == g.to_local().dtype == g._spec.tensor_meta.dtype == torch.float64 for g in gradients)
