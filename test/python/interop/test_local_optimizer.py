"""local_optimizer(): the training of the same optimizer over DTensors, to the bit, and the same to who looks at it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine import ours
from form import by_form
from layouts import RANKS, SOME, by_layer
from models import batch, local, mlp
from parity import Parity, Wrapping, assert_same_bits, train
from pool import run_ranks
from tensor_parallel import on_mesh, stack_program
from test_interop_optimizers import OPTIMIZERS, WIDTHS, copy_of, optimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad_norm_
from torch.optim import ASGD, SGD, Adadelta, Adam, Adamax, AdamW, NAdam, RAdam, Rprop
from torch.optim.lr_scheduler import StepLR
from training_models import mlp_program

import shardwise
from shardwise import local_optimizer

Make = Callable[[nn.Module], torch.optim.Optimizer]

#: Beside those of the tests of plain optimizers.
OTHERS = [
    optimizer(AdamW, eps=0.1, foreach=False),
    optimizer(Adadelta, foreach=True),
    optimizer(Adamax, eps=0.1, foreach=True),
    optimizer(ASGD, foreach=True),
    optimizer(NAdam, eps=0.1, foreach=True),
    optimizer(RAdam, eps=0.1, foreach=True),
]


def locally(make: Make) -> Make:
    return lambda model: local_optimizer(make(model))


def assert_same_state(mine: torch.optim.Optimizer, usual: torch.optim.Optimizer) -> None:
    """By parameter, in the same order."""
    assert len(mine.state) == len(usual.state) > 0
    for (parameter, entry), other in zip(mine.state.items(), usual.state.values(), strict=True):
        assert isinstance(parameter, DTensor)
        assert list(entry) == list(other)
        for name, value in entry.items():
            wanted = other[name]
            if not isinstance(wanted, torch.Tensor):
                assert value == wanted, name
                continue
            assert type(value) is type(wanted) and value.dtype == wanted.dtype, name
            assert torch.equal(local(value), local(wanted)), name
            if isinstance(value, DTensor):
                assert value._spec == wanted._spec, f"{name}: {value._spec} for {wanted._spec}"


def same_training(rank: int, layout: str) -> None:
    for make in OPTIMIZERS + OTHERS if layout == "fully_shard" else OPTIMIZERS[1::2]:
        program = mlp_program(WIDTHS, optimizer=make, steps=3)
        usual = train(ours(), program, Wrapping(by_layer(layout)), rank)
        mine = Parity(replace(program, optimizer=locally(make))).both(by_layer(layout))
        assert_same_bits(mine, usual)
        assert type(mine.optimizer).__name__ == f"Local{type(usual.optimizer).__name__}"
        assert_same_state(mine.optimizer, usual.optimizer)
    # torch has no Rprop of DTensors.
    Parity(mlp_program(WIDTHS, optimizer=locally(optimizer(Rprop)), steps=4)).run(ours(), by_layer(layout))


def same_when_looked_at(rank: int) -> None:
    # Whoever looks at the state between steps, or changes it, changes nothing else.
    for make in OPTIMIZERS:
        models: list[Any] = [mlp(*WIDTHS) for _ in range(2)]
        for model in models:
            by_layer("fully_shard")(ours(), model)
        mine, usual = locally(make)(models[0]), make(models[1])
        for step in range(5):
            for model, each in zip(models, (mine, usual), strict=True):
                each.zero_grad()
                model(batch(step, rank, WIDTHS[0])).pow(2).mean().backward()
                each.step()
                if step == 1:
                    assert each.state
                if step == 2:
                    for entry in each.state.values():
                        for value in entry.values():
                            if isinstance(value, DTensor):
                                value.mul_(0.5)
                if step == 3:
                    each.load_state_dict(copy.deepcopy(each.state_dict()))
            assert_same_values(models)
        assert_same_state(mine, usual)


def assert_same_values(models: list[Any]) -> None:
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(one), local(other)), f"{name}: {local(one)} for {local(other)}"


def tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrapping = on_mesh(mesh["tp"], False, lambda engine, module: engine.fully_shard(module, mesh=mesh["dp"]))
    for make in by_form((OPTIMIZERS[4],), (OPTIMIZERS[1], OPTIMIZERS[4], OPTIMIZERS[5])):
        program = replace(stack_program(8, 4), optimizer=make)
        usual = train(ours(), program, wrapping, rank // 2)
        mine = train(ours(), replace(program, optimizer=locally(make)), wrapping, rank // 2)
        assert any(isinstance(p.placements[0], _StridedShard) for p in mine.model.parameters())
        assert_same_bits(mine, usual)
        assert_same_state(mine.optimizer, usual.optimizer)


def exchanged_states(rank: int, layout: str, folder: str) -> None:
    for number in by_form((1, 4), (1, 4, 5)):
        make = OPTIMIZERS[number]
        program = mlp_program(WIDTHS)
        unbroken: Any = program.make()
        by_layer(layout)(ours(), unbroken)
        reference = make(unbroken)
        for step in range(6):
            advance(unbroken, reference, step, rank)
        for first, second in ((locally(make), make), (make, locally(make)), (locally(make), locally(make))):
            for way in ("dict", "full", "files"):
                model: Any = program.make()
                by_layer(layout)(ours(), model)
                one = first(model)
                for step in range(3):
                    advance(model, one, step, rank)
                again: Any = program.make()
                by_layer(layout)(ours(), again)
                again.load_state_dict(copy_of(model.state_dict()))
                other = second(again)
                options = StateDictOptions(full_state_dict=way == "full")
                state = get_optimizer_state_dict(model, one, options=options)
                if way == "files":
                    where = f"{folder}/{number}"
                    dcp.save({"optimizer": state}, checkpoint_id=where)
                    state = get_optimizer_state_dict(again, other)
                    dcp.load({"optimizer": state}, checkpoint_id=where)
                set_optimizer_state_dict(again, other, optim_state_dict=copy_of(state), options=options)
                for step in range(3, 6):
                    advance(again, other, step, rank)
                assert_same_values([again, unbroken])


def advance(model: Any, one: torch.optim.Optimizer, step: int, rank: int) -> torch.Tensor:
    one.zero_grad()
    loss: torch.Tensor = model(batch(step, rank, WIDTHS[0])).pow(2).mean()
    loss.backward()
    one.step()
    return loss.detach()


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
    assert mine[0] == usual[0] == 3 and len(mine) == len(usual) > 3
    for entry, other in zip(mine[1:], usual[1:], strict=True):
        assert list(entry) == list(other) == ["past", "named", "step 3"]
        pairs = [*zip(entry["past"], other["past"], strict=True)]
        pairs += [(entry["named"]["sum"], other["named"]["sum"]), (entry["step 3"], other["step 3"])]
        for a, b in pairs:
            assert type(a) is type(b) is DTensor and a._spec == b._spec and torch.equal(local(a), local(b))


def full_copies_follow(rank: int) -> None:
    # A forward leaves full parameters, and then a step writes to the shards: the next forward gathers anew.
    for make in OPTIMIZERS:
        model, reference = mlp(*WIDTHS), mlp(*WIDTHS)
        by_layer("fully_shard", reshard_after_forward=False)(ours(), model)
        one = local_optimizer(make(model))
        parameters = list(model.parameters())
        for step in range(4):
            one.zero_grad()
            model(batch(step, rank, WIDTHS[0])).pow(2).mean().backward()
            with torch.no_grad():
                before = model(batch(9, rank, WIDTHS[0])).clone()
                one.step()
                for parameter, whole in zip(parameters, reference.parameters(), strict=True):
                    whole.copy_(parameter.full_tensor())
                after = model(batch(9, rank, WIDTHS[0]))
                assert torch.equal(after, reference(batch(9, rank, WIDTHS[0])))
                assert not torch.equal(after, before)


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


def everything_around(rank: int) -> None:
    for make in (OPTIMIZERS[0], OPTIMIZERS[1], OPTIMIZERS[4], OPTIMIZERS[5]):
        runs = []
        for each in (locally(make), make):
            model = mlp(*WIDTHS)
            by_layer("fully_shard")(ours(), model)
            mesh: Any = next(model.parameters())
            extra = nn.Parameter(distribute_tensor(torch.ones(5), mesh.device_mesh, [Shard(0)]))
            hooked = Hooked(each, model, extra)
            for number in range(6):
                hooked.step(number, rank)
            runs.append(hooked)
        mine, usual = runs
        assert_same_values([mine.model, usual.model])
        assert torch.equal(local(mine.extra), local(usual.extra)) and not torch.equal(local(mine.extra), torch.ones(3))
        assert mine.seen == usual.seen and len(mine.seen) >= 10
        assert [group["lr"] for group in mine.optimizer.param_groups] == [
            group["lr"] for group in usual.optimizer.param_groups
        ]
        assert mine.scaler.get_scale() == usual.scaler.get_scale()
        assert_same_state(mine.optimizer, usual.optimizer)


def changed_parameters(rank: int) -> None:
    # What is in the DTensors is looked up at each step.
    models: list[Any] = []
    for make in (locally(OPTIMIZERS[0]), OPTIMIZERS[0]):
        model = mlp(*WIDTHS)
        by_layer("fully_shard")(ours(), model)
        one = make(model)
        for step in range(5):
            if step == 2:
                model.double()
            one.zero_grad()
            model(batch(step, rank, WIDTHS[0]).to(next(model.parameters()).dtype)).pow(2).mean().backward()
            assert one.step(lambda: 3.0) == 3.0
        models.append(model)
    assert next(models[0].parameters()).dtype == torch.float64
    assert_same_values(models)


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


class TestLocalOptimizer:
    @pytest.mark.parametrize("layout", SOME)
    def test_trains_as_the_usual_one(self, layout: str) -> None:
        run_ranks(RANKS[layout], same_training, layout)

    def test_state_is_looked_at(self) -> None:
        run_ranks(2, same_when_looked_at)

    def test_with_tensor_parallelism(self) -> None:
        run_ranks(4, tensor_parallel)

    @pytest.mark.parametrize("layout", ["fully_shard", "replicate"])
    def test_states_go_both_ways(self, layout: str, tmp_path: Path) -> None:
        run_ranks(2, exchanged_states, layout, str(tmp_path))

    def test_any_state(self) -> None:
        run_ranks(2, any_state)

    def test_full_copies_follow(self) -> None:
        run_ranks(2, full_copies_follow)

    def test_writes_are_seen(self) -> None:
        run_ranks(2, writes_are_seen)

    def test_everything_around_it(self) -> None:
        run_ranks(2, everything_around)

    def test_changed_parameters(self) -> None:
        run_ranks(2, changed_parameters)

    def test_other_placements(self) -> None:
        run_ranks(2, other_placements)

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
