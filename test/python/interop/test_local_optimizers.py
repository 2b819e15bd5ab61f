"""Local steps: those of local_optimizer(), and of programs that do not know of them (set_local_optimizers()). They
train as the usual ones, to the bit, and are the same to who looks at the optimizer."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine import ours
from form import by_form
from layouts import by_layer
from local_steps import ADAM, FUSED, Make, advance, assert_same_state, assert_same_values, both_ways, counted, wrapped
from models import assert_same_tree, batch, local, mlp
from parity import Wrapping, assert_same_bits, train
from pool import on_ranks, run_ranks
from tensor_parallel import on_mesh, stack_program
from test_interop_optimizers import OPTIMIZERS, WIDTHS, InBackward, optimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad_norm_
from torch.optim import ASGD, SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from training_models import mlp_program

import shardwise
from shardwise import local_optimizer
from shardwise.testing import run_ranks as run_new_ranks

#: All that work element by element; those of the tests of plain optimizers first.
EVERY = [
    *OPTIMIZERS,
    optimizer(AdamW, eps=0.1, foreach=False),
    optimizer(Adadelta, foreach=True),
    optimizer(Adamax, eps=0.1, foreach=True),
    optimizer(ASGD, foreach=True),
    optimizer(NAdam, eps=0.1, foreach=True),
    optimizer(RAdam, eps=0.1, foreach=True),
    optimizer(Adam, eps=0.1, maximize=True, fused=True),
    optimizer(AdamW, eps=0.1, amsgrad=True, maximize=True, foreach=False),
    optimizer(RMSprop, eps=0.1, momentum=0.5, foreach=False),
]
WAYS = ("local_optimizer", "automatic")


def locally(make: Make) -> Make:
    return lambda model: local_optimizer(make(model))


def compared(way: str, make: Make, program: Callable[[Make], Any], local_steps: int) -> tuple[Any, Any]:
    """What a program returns in local steps, and in the usual ones."""
    if way == "local_optimizer":
        return program(locally(make)), program(make)
    return both_ways(lambda: program(make), local_steps)


def same_training(rank: int, layout: str, way: str) -> None:
    for make in by_form(EVERY[WAYS.index(way) :: 2], EVERY):

        def program(make: Make) -> Any:
            return train(ours(), mlp_program(WIDTHS, optimizer=make, steps=3), Wrapping(by_layer(layout)), rank)

        mine, usual = compared(way, make, program, 3)
        assert_same_bits(mine, usual)
        prefix = "Local" if way == "local_optimizer" else ""
        assert type(mine.optimizer).__name__ == f"{prefix}{type(usual.optimizer).__name__}"
        assert_same_state(mine.optimizer, usual.optimizer)


def tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrapping = on_mesh(mesh["tp"], False, lambda engine, module: engine.fully_shard(module, mesh=mesh["dp"]))

    def program(make: Make) -> Any:
        return train(ours(), replace(stack_program(8, 3), optimizer=make), wrapping, rank // 2)

    mine, usual = compared("local_optimizer", OPTIMIZERS[4], program, 0)
    assert any(isinstance(p.placements[0], _StridedShard) for p in mine.model.parameters())
    assert_same_bits(mine, usual)
    assert_same_state(mine.optimizer, usual.optimizer)


class Hooked:
    """Everything that is put around an optimizer, and what its hooks saw."""

    def __init__(self, make: Make, model: nn.Module, extra: nn.Parameter) -> None:
        self.model = model
        self.optimizer = make(model)
        self.optimizer.add_param_group({"params": [extra], "lr": 0.2})
        self.extra = extra
        self.scheduler = StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.seen: list[Any] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.look("before"))
        self.optimizer.register_step_post_hook(lambda *_: self.look("after"))

    def look(self, when: str) -> None:
        kinds = [type(p) for group in self.optimizer.param_groups for p in group["params"]]
        states = [sorted(entry) for entry in self.optimizer.state.values()]
        self.seen.append((when, kinds, states, [p.grad is None for p in self.model.parameters()]))

    def step(self, number: int, rank: int) -> None:
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss = self.model(batch(number, rank, WIDTHS[0])).pow(2).mean() + (self.extra * number).to_local().sum()
        if number == 2:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), 0.2)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()


def everything_around(rank: int, way: str) -> None:
    # A learning rate scheduler from before the first step, a scaler that skips one, clipping, hooks, a late group.
    def program(make: Make) -> Hooked:
        model = wrapped()
        extra = nn.Parameter(distribute_tensor(torch.ones(5), next(model.parameters()).device_mesh, [Shard(0)]))
        hooked = Hooked(make, model, extra)
        handles = [
            register_optimizer_step_pre_hook(lambda *_: hooked.look("first")),
            register_optimizer_step_post_hook(lambda *_: hooked.look("last")),
        ]
        for number in range(6):
            hooked.step(number, rank)
        for handle in handles:
            handle.remove()
        return hooked

    for make in (OPTIMIZERS[0], OPTIMIZERS[3]):
        # A fused optimizer is stepped when it is to skip, too.
        fused = make(wrapped()).defaults.get("fused")
        mine, usual = compared(way, make, program, 6 if fused else 5)
        assert_same_values([mine.model, usual.model])
        assert torch.equal(local(mine.extra), local(usual.extra)) and not torch.equal(local(mine.extra), torch.ones(3))
        assert mine.seen == usual.seen and {when for when, *_ in mine.seen} == {"first", "before", "after", "last"}
        assert all(kind is DTensor for _, kinds, *_ in mine.seen for kind in kinds)
        assert mine.scheduler.get_last_lr() == usual.scheduler.get_last_lr()
        assert mine.scaler.get_scale() == usual.scaler.get_scale()
        assert_same_state(mine.optimizer, usual.optimizer)


class Remembering(torch.optim.Optimizer):
    """Its state has lists, dicts, other keys than parameters, and names that come and go."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                entry.setdefault("past", []).append(parameter.grad.clone())
                entry.setdefault("named", {})["sum"] = sum(entry["past"])
                entry[f"step {self.state['steps']}"] = entry.pop(f"step {self.state['steps'] - 1}", parameter.clone())
                parameter.sub_(entry["named"]["sum"], alpha=group["lr"])


def any_state(rank: int) -> None:
    # A refused step changes nothing, in lists neither.
    model: Any = ours().fully_shard(nn.Linear(3, 4))
    refused = local_optimizer(Remembering(model.parameters()), elementwise=True)
    past = [model.weight.clone().detach()]
    refused.state[model.weight]["past"] = past
    refused.state[model.bias]["past"] = [model.bias.detach().redistribute(placements=[Replicate()])]
    with pytest.raises(ValueError, match="the optimizer's state 'past'"):
        refused.step()
    assert refused.state[model.weight]["past"] is past and type(past[0]) is DTensor
    runs: list[tuple[Any, Any]] = []
    for is_local in (True, False):
        model = mlp(*WIDTHS)
        by_layer("fully_shard")(ours(), model)
        one = Remembering(model.parameters())
        if is_local:
            local_optimizer(one, elementwise=True)
        for step in range(3):
            advance(model, one, step, rank)
        runs.append((model, one.state))
    assert_same_values([model for model, _ in runs])
    mine, usual = (list(state.values()) for _, state in runs)
    assert mine[0] == 3 and len(mine) > 3 and all([*entry] == ["past", "named", "step 3"] for entry in mine[1:])
    assert all(type(leaf) is DTensor for leaf in tree_leaves(mine[1:]))
    assert_same_tree(mine, usual)


def without_a_usual_one(rank: int) -> None:
    # torch has no Rprop of DTensors.
    train(ours(), mlp_program(WIDTHS, optimizer=locally(optimizer(Rprop)), steps=4), Wrapping(by_layer("mixed")), rank)


def writes_are_seen(rank: int) -> None:
    model: Any = ours().fully_shard(nn.Linear(3, 4))
    one = local_optimizer(SGD(model.parameters(), lr=0.1))
    model(batch(0, rank, 3)).sum().backward()
    loss = (model.weight * model.weight).to_local().sum()
    versions = [p._version for p in model.parameters()]
    one.step()
    assert all(p._version > version for p, version in zip(model.parameters(), versions, strict=True))
    assert all(p._local_tensor.grad is None and p.grad is not None for p in model.parameters())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def other_placements(rank: int) -> None:
    # A gradient that lies otherwise is moved, and a state that does is refused.
    model: Any = ours().fully_shard(nn.Linear(3, 4))
    reference = nn.Linear(3, 4)
    reference.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    one, alone = (local_optimizer(SGD(each.parameters(), lr=0.1, momentum=0.9)) for each in (model, reference))
    for _ in range(3):
        for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.grad = torch.arange(whole.numel()).view(whole.shape).float()
            mine.grad = distribute_tensor(whole.grad, mine.device_mesh, [Replicate()])
        one.step()
        alone.step()
        for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), whole)
    entry = one.state[model.weight]
    entry["momentum_buffer"] = entry["momentum_buffer"].redistribute(placements=[Replicate()])
    with pytest.raises(
        ValueError, match=r"'momentum_buffer' of a parameter of shape \(4, 3\) has the placements .*Replicate"
    ):
        one.step()


def closures(rank: int) -> None:
    def program() -> tuple[Any, Optimizer, list[Any]]:
        model = wrapped()
        one = FUSED(model)
        losses = []
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                assert torch.is_grad_enabled() and all(type(p) is DTensor for p in one.param_groups[0]["params"])
                one.zero_grad()
                loss: torch.Tensor = model(batch(step, rank, WIDTHS[0])).pow(2).mean()
                loss.backward()
                return loss

            losses.append(one.step(closure) if step % 2 else one.step(closure=closure))
            assert torch.is_grad_enabled() and all(p._local_tensor.grad is None for p in model.parameters())
        return model, one, losses

    mine, usual = both_ways(program, 4)
    assert_same_values([mine[0], usual[0]])
    assert mine[2] == usual[2]


def errors(rank: int) -> None:
    """In a closure, and in a step that is under way; then the training goes on."""
    for make in (ADAM, OPTIMIZERS[5]):

        def program(make: Make = make) -> tuple[Any, Optimizer]:
            model = wrapped()
            one = make(model)
            for step in range(4):
                advance(model, one, step, rank)
                before = [(p, list(entry.items())) for p, entry in one.state.items()]
                held = list(model.parameters())
                with pytest.raises(ZeroDivisionError):
                    one.step(lambda: 1 / 0)
                last = one.state[held[-1]]
                taken = last.pop("exp_avg_sq")
                with pytest.raises(KeyError, match="exp_avg_sq"):
                    one.step()
                last["exp_avg_sq"] = taken
                assert all(map(lambda a, b: a is b, one.param_groups[0]["params"], held))
                assert all(p._local_tensor.grad is None and p.grad is not None for p in held)
                for (p, items), (q, entry) in zip(before, one.state.items(), strict=True):
                    assert p is q and [(name, id(value)) for name, value in items] == [
                        (name, id(value)) for name, value in entry.items()
                    ]
            return model, one

        mine, usual = both_ways(program, 4)
        assert_same_values([mine[0], usual[0]])
        assert_same_state(mine[1], usual[1])


def errors_under_way(rank: int) -> None:
    """A step that raises after it has made state and written to parameters: neither is lost."""

    def program() -> tuple[Any, Optimizer]:
        model = wrapped()
        one = optimizer(Adam, eps=0.1, foreach=False)(model)
        for step in range(2):
            advance(model, one, step, rank)
        first, *_, last = model.parameters()
        del one.state[first]
        one.state[last]["exp_avg"] = distribute_tensor(torch.ones(4, 9), last.device_mesh, [Shard(0)])
        version, value = first._version, local(first).clone()
        with pytest.raises(RuntimeError):
            one.step()
        assert first._version > version and not torch.equal(local(first), value)
        assert all(type(p) is DTensor and p._local_tensor.grad is None for p in one.param_groups[0]["params"])
        one.state[last]["exp_avg"] = torch.zeros_like(last)
        for step in range(2, 4):
            advance(model, one, step, rank)
        one.state[first] = one.state.pop(first)
        return model, one

    mine, usual = both_ways(program, 4)
    assert_same_values([mine[0], usual[0]])
    assert_same_state(mine[1], usual[1])


def looked_at(rank: int) -> None:
    """A program holds the state across steps, changes it, replaces it and loads it."""

    def program() -> tuple[Any, Optimizer]:
        model = wrapped()
        one = ADAM(model)
        advance(model, one, 0, rank)
        state = one.state
        entries = {p: entry["exp_avg"] for p, entry in state.items()}
        advance(model, one, 1, rank)
        assert one.state is state and all(one.state[p]["exp_avg"] is value for p, value in entries.items())
        for entry in state.values():
            entry["exp_avg"].mul_(0.5)
            entry["exp_avg_sq"] = entry["exp_avg_sq"] * 2
        freed = weakref.ref(next(iter(state.values()))["exp_avg_sq"]._local_tensor)
        advance(model, one, 2, rank)
        for entry in state.values():
            entry["exp_avg_sq"] = entry["exp_avg_sq"].clone()
        assert freed() is None, "nothing keeps what the program dropped"
        advance(model, one, 3, rank)
        one.load_state_dict(copy.deepcopy(one.state_dict()))
        advance(model, one, 4, rank)
        # Without the state of one parameter it begins anew.
        del one.state[next(model.parameters())]
        advance(model, one, 5, rank)
        return model, one

    mine, usual = both_ways(program, 6)
    assert_same_values([mine[0], usual[0]])
    assert {id(p) for p in mine[1].state} == {id(p) for p in mine[0].parameters()}
    assert_same_tree(*([one.state[p] for p in model.parameters()] for model, one in (mine, usual)))


def checkpoints(rank: int, layout: str) -> None:
    unbroken: Any = wrapped(layout)
    reference = ADAM(unbroken)
    for step in range(6):
        advance(unbroken, reference, step, rank)
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        for first_is_local in (True, False):
            model: Any = wrapped(layout)
            one, other = ADAM(model), ADAM(again := wrapped(layout))
            shardwise.set_local_optimizers(first_is_local)
            for step in range(3):
                advance(model, one, step, rank)
            state = get_optimizer_state_dict(model, one, options=options)
            again.load_state_dict(copy.deepcopy(model.state_dict()))
            shardwise.set_local_optimizers(not first_is_local)
            set_optimizer_state_dict(again, other, optim_state_dict=copy.deepcopy(state), options=options)
            for step in range(3, 6):
                advance(again, other, step, rank)
            shardwise.set_local_optimizers(False)
            assert_same_values([again, unbroken])
            assert_same_state(other, reference)


def in_backward(rank: int) -> None:
    program: Any = replace(mlp_program(WIDTHS, steps=4), optimizer=InBackward)
    count = 4 * len(list(wrapped().parameters()))
    mine, usual = both_ways(lambda: train(ours(), program, Wrapping(by_layer("fully_shard")), rank), count)
    assert_same_bits(mine, usual)


def installed(rank: int) -> None:
    model = wrapped()
    one = ADAM(model)
    for turn_off in (shardwise.uninstall, lambda: shardwise.set_local_optimizers(False)):
        with counted() as steps:
            advance(model, one, 0, rank)
            shardwise.install()
            for step in range(3):
                advance(model, one, step, rank)
            turn_off()
            advance(model, one, 1, rank)
        shardwise.uninstall()
        assert len(steps) == 3


class TestLocalOptimizer:
    test_trains_as_the_usual_one = on_ranks(2, same_training, "local_optimizer", each=["fully_shard", "replicate"])
    test_everything_around_it = on_ranks(2, everything_around, "local_optimizer")
    test_without_a_usual_one = on_ranks(2, without_a_usual_one)
    test_with_tensor_parallelism = on_ranks(4, tensor_parallel)
    test_any_state = on_ranks(2, any_state)
    test_writes_are_seen = on_ranks(2, writes_are_seen)
    test_other_placements = on_ranks(2, other_placements)

    def test_refusals(self) -> None:
        parameters = [nn.Parameter(torch.ones(2, 2))]
        with pytest.raises(ValueError, match="whether Adafactor works element by element"):
            local_optimizer(torch.optim.Adafactor(parameters))
        with pytest.raises(ValueError, match="whether LBFGS works"):
            local_optimizer(torch.optim.LBFGS(parameters))
        scheduled = SGD(parameters)
        StepLR(scheduled, 1)
        with pytest.raises(ValueError, match="right after the optimizer is made"):
            local_optimizer(scheduled)
        with pytest.raises(ValueError, match="differentiable=True"):
            local_optimizer(Adam(parameters, differentiable=True))
        with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer"):
            local_optimizer(parameters)  # type: ignore[type-var]

        class Own(SGD):
            """Of somebody else."""

        with pytest.raises(ValueError, match="Pass elementwise=True if it does"):
            local_optimizer(Own(parameters))
        one = shardwise.local_optimizer(Own(parameters), elementwise=True)
        assert isinstance(one, Own) and local_optimizer(one) is one


class TestAutomaticSteps:
    test_train_as_the_usual_ones = on_ranks(2, same_training, "fully_shard", "automatic")
    test_everything_around_them = on_ranks(2, everything_around, "automatic")
    test_closures = on_ranks(2, closures)

    def test_errors(self) -> None:
        run_ranks(2, errors)
        run_ranks(2, errors_under_way)

    test_state_is_looked_at = on_ranks(2, looked_at)

    test_checkpoints = on_ranks(2, checkpoints, each=["fully_shard", "replicate"])
    test_in_backward = on_ranks(2, in_backward)

    def test_install_turns_them_on(self) -> None:
        run_new_ranks(2, installed)
