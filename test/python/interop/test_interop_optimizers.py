"""torch's optimizers, clipping and gradient scaling on wrapped models, beside torch's engine and one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine import TORCH, Engine, ours
from form import by_form
from layouts import RANKS, SOME, by_layer
from models import local, whole
from parity import Parity, Wrapping, assert_pieces, assert_same_bits, momentum, train
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from training_models import mlp_program

#: Of the last layer, and of one bias, the second rank has nothing.
WIDTHS = (5, 7, 3, 1)


def optimizer(kind: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), lr=0.05, **options)


#: With Adam's own epsilon, elements whose gradient is nearly zero would be moved by the noise in it.
OPTIMIZERS = [
    optimizer(SGD, momentum=0.9, weight_decay=0.1, foreach=False),
    optimizer(SGD, momentum=0.9, nesterov=True, foreach=True),
    optimizer(Adam, eps=0.1, amsgrad=True, foreach=True),
    optimizer(Adam, eps=0.1, fused=True),
    optimizer(AdamW, eps=0.1, weight_decay=0.3, foreach=True),
    optimizer(AdamW, eps=0.1, weight_decay=0.3, fused=True),
    # R45: its state is made with it, for the parameters that it got.
    optimizer(Adagrad, initial_accumulator_value=0.1, foreach=True),
    optimizer(RMSprop, eps=0.1, centered=True, foreach=True),
]


def every_optimizer(rank: int, layout: str) -> None:
    for make in OPTIMIZERS if layout == "fully_shard" else OPTIMIZERS[1::2]:
        program = mlp_program(WIDTHS, optimizer=make, steps=4)
        trace = Parity(program).both(by_layer(layout))
        parameters = list(trace.model.parameters())
        assert list(trace.optimizer.state) == parameters
        for parameter, state in trace.optimizer.state.items():
            for name, value in state.items():
                assert name == "step" or (isinstance(value, DTensor) and value._spec == parameter._spec), name


class InBackward:
    """Steps a parameter as soon as its gradient is there, and drops the gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.step_one)

    def step_one(self, parameter: Any) -> None:
        one = self.optimizers.setdefault(parameter, SGD([parameter], lr=0.05, momentum=0.9))
        one.step()
        one.zero_grad()

    def zero_grad(self, set_to_none: bool) -> None:
        """There is nothing to drop."""

    def step(self) -> None:
        """It is done."""


def optimizer_in_backward(rank: int, layout: str) -> None:
    parity = Parity(mlp_program(WIDTHS, steps=4, optimizer=momentum))
    hooked: dict[nn.Module, InBackward] = {}

    def make() -> nn.Module:
        model = parity.program.make()
        hooked[model] = InBackward(model)
        return model

    after: Any = replace(parity.program, optimizer=InBackward)
    before: Any = replace(parity.program, make=make, optimizer=lambda model: hooked[model])
    traces = [train(engine, after, Wrapping(by_layer(layout)), rank) for engine in (TORCH, ours())]
    assert_same_bits(traces[1], traces[0])
    # Hooks of the parameters that are wrapped go on with ours; with torch's nobody calls them any more.
    if ours() != TORCH:
        traces.append(train(ours(), before, Wrapping(by_layer(layout)), rank))
    for trace in traces:
        for number, (step, alone) in enumerate(zip(trace.steps, parity.expected, strict=True)):
            assert not any(gradient is not None for gradient in step.gradients.values())
            assert_pieces(f"step {number}: the value", step.values, alone.values, parity.pieces)


class Clip:
    """Clips gradients, and notes the norms and the collectives that it took."""

    def __init__(self, limit: float, order: float, foreach: bool) -> None:
        self.limit, self.order, self.foreach = limit, order, foreach
        self.norms: list[torch.Tensor] = []
        self.counts: list[dict[str, int]] = []

    def __call__(self, model: nn.Module) -> None:
        with CommDebugMode() as mode:
            norm = clip_grad_norm_(model.parameters(), self.limit, self.order, foreach=self.foreach)
        self.norms.append(whole(norm))
        self.counts.append({op.__name__: count for op, count in mode.get_comm_counts().items()})


def clipped(rank: int, layout: str) -> None:
    # R48: the norm is that of all gradients together, on every rank.
    steps = 3
    limits = ((0.02, True), (0.02, False), (100.0, True))
    for number, order in enumerate((1.0, 2.0, 3.0, float("inf"))):
        for limit, foreach in by_form([limits[number % 3]], limits):
            clip = Clip(limit, order, foreach)
            # torch has no infinity norm of nothing.
            widths = (5, 7, 3, 2) if order == float("inf") else WIDTHS
            parity = Parity(mlp_program(widths, steps=steps, between=clip))
            parity.both(by_layer(layout))
            alone, theirs, mine = (clip.norms[i * steps : (i + 1) * steps] for i in range(3))
            assert all(norm > 0.03 for norm in alone), f"{limit} is no limit: {alone}"
            torch.testing.assert_close(mine, alone, msg=lambda text, o=order: f"norm of order {o}: {text}")
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
            counts = clip.counts[2 * steps :]
            assert counts == clip.counts[steps : 2 * steps]
            # Along the dimension of the mesh that holds shards.
            expected = {} if layout == "replicate" else {"all_reduce": 1}
            assert all(count == expected for count in counts), counts


#: In the third step infinities reach the gradients: through a loss, or in the memory of some ranks alone.
OVERFLOWS = ("loss of rank 0", "shards of rank 0", "shards of rank 1")


def scaled(engine: Engine, layout: str, overflow: str, rank: int) -> list[dict[str, torch.Tensor]]:
    """Scales and values of every step."""
    # Of the last layer the second rank has nothing.
    program = mlp_program((6, 7, 1), optimizer=momentum)
    model: Any = program.make()
    by_layer(layout)(engine, model)
    optimizer = momentum(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    trace = []
    for step in range(6):
        optimizer.zero_grad()
        loss = program.loss(model, step, rank)
        if step == 2 and rank == 0 and overflow == OVERFLOWS[0]:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step == 2 and overflow != OVERFLOWS[0] and rank % 2 == int(overflow[-1]):
            # Rank 1 has three of the first layer's seven rows.
            local(model[0].weight.grad)[2, 3] = float("inf")
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        values = {name: local(p).clone() for name, p in model.named_parameters()}
        trace.append({"scale": torch.tensor(scaler.get_scale()), **values})
    return trace


def scaler_skips_everywhere(rank: int, layout: str) -> None:
    # R50: infinities on one rank let all skip the step, and halve the scale of all.
    for overflow in OVERFLOWS if layout != "replicate" else OVERFLOWS[:1]:
        theirs, mine = (scaled(engine, layout, overflow, rank) for engine in (TORCH, ours()))
        for step, (one, torchs) in enumerate(zip(mine, theirs, strict=True)):
            assert all(torch.equal(value, torchs[name]) for name, value in one.items()), f"{overflow}, step {step}"
        assert [float(step["scale"]) for step in mine] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
        assert all(torch.equal(mine[1][name], mine[2][name]) for name in mine[1] if name != "scale")


def parameters_without_gradients(rank: int, layout: str) -> None:
    # R44: a forward left full parameters, and the optimizer took those. R45: it was made before the wrapping. Both
    # would train nothing, with torch's engine in silence.
    program = mlp_program(WIDTHS)
    for engine in (TORCH, ours()):
        for when in ("before", "after a forward"):
            model: Any = program.make()
            optimizer = Adagrad(model.parameters(), lr=0.05)
            by_layer(layout)(engine, model)
            if when == "after a forward":
                program.loss(model, 0, rank)
                optimizer = Adagrad(model.parameters(), lr=0.05)
            program.loss(model, 1, rank).backward()
            before = whole(model[4].weight.detach()).clone()
            if engine == TORCH:
                optimizer.step()
                assert torch.equal(whole(model[4].weight.detach()), before)
                continue
            what = "as it was before its module was wrapped" if when == "before" else "full"
            with pytest.raises(RuntimeError, match=rf"this Adagrad holds .*{what}.*That tensor gets no gradients"):
                optimizer.step()
            Adagrad(model.parameters(), lr=0.05).step()
            assert not torch.equal(whole(model[4].weight.detach()), before)


class TestInteropOptimizers:
    test_every_optimizer = on_ranks(RANKS, every_optimizer, each=SOME)
    test_optimizer_in_backward = on_ranks(RANKS, optimizer_in_backward, each=SOME)
    test_parameters_that_no_gradient_reaches = on_ranks(RANKS, parameters_without_gradients, each=SOME)


class TestInteropClipping:
    test_norms_are_those_of_one_process = on_ranks(RANKS, clipped, each=[*RANKS])


class TestInteropGradScaler:
    test_infinities_on_one_rank = on_ranks(RANKS, scaler_skips_everywhere, each=SOME)
