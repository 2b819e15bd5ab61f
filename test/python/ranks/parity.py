"""Trains a program on ranks with an engine, and in one process with the data of all ranks, and compares every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from devices import data_on
from engine import TORCH, Engine, ours
from form import by_form
from models import local
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With Adam's own epsilon, elements whose gradient is nearly zero would be moved by the noise in it."""
    return torch.optim.Adam(model.parameters(), lr=0.05, eps=0.1, foreach=True)


def nothing(*_: Any) -> None:
    """For what need not happen."""


@dataclass(frozen=True)
class Program:
    """A model and what is done with it; `number` counts forwards, and the data differs with it and with the rank."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    steps: int = by_form(3, 10)
    #: Forwards and backwards a step, whose gradients add up.
    parts: int = 1
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum
    #: Called on the model between the last backward of a step and the optimizer, in one process too.
    between: Callable[[Any], Any] = nothing


#: Wraps a model: `wrap(engine, model)`.
Wrap = Callable[[Engine, Any], Any]


def by_child(function: str, **options: Any) -> Wrap:
    """A unit for each child of a model, and one for the rest; `function` is the name of one."""

    def wrap(engine: Engine, model: Any) -> None:
        for module in (*model.children(), model):
            getattr(engine, function)(module, **options)

    return wrap


#: Calls fully_shard() or replicate() on a module, or on a list of them.
WrapOne = Callable[[Any], Any]


@dataclass(frozen=True)
class Wrapping:
    """How a program comes to run on ranks."""

    wrap: Wrap
    #: Called before the forward of each part of a step.
    before: Callable[[Any, int], Any] = nothing
    #: Called after the backward of each part of a step.
    after: Callable[[Any, int], Any] = nothing
    #: Called after the optimizer's step.
    after_optimizer: Callable[[Any], Any] = nothing


@dataclass
class Step:
    """By part: this rank's losses (in one process: those of every rank). By name: gradients, and values at its end."""

    losses: list[list[torch.Tensor]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Collectives of forward and backward, by name.
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Trace:
    steps: list[Step]
    model: Any
    optimizer: Any = None


def plain(name: str) -> str:
    """A name without what a checkpoint wrapper puts into it."""
    return name.replace("_checkpoint_wrapped_module.", "")


def snapshot(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What it is now; of a DTensor with its placements."""
    if tensor is None:
        return None
    return tensor.detach().clone()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return local(tensor).cpu()


def train_alone(program: Program, world_size: int, dtype: torch.dtype = torch.float32) -> list[Step]:
    """What one process computes: the gradient of the mean of the losses of all ranks."""
    model = program.make().to(dtype)
    optimizer = program.optimizer(model)
    steps = []
    for number in range(program.steps):
        step = Step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        for part in range(program.parts):
            losses = []
            for rank in range(world_size):
                loss = program.loss(model, number * program.parts + part, rank)
                losses.append(loss.detach())
                (loss / world_size).backward()
            step.losses.append(losses)
        program.between(model)
        step.gradients = {name: snapshot(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        step.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        steps.append(step)
    return steps


def train(engine: Engine, program: Program, wrapping: Wrapping, rank: int, counted: bool = False) -> Trace:
    """On this rank, with the data of `rank`."""
    model = program.make().to(engine.device)
    wrapping.wrap(engine, model)
    optimizer = program.optimizer(model)
    trace = Trace([], model, optimizer)
    for number in range(program.steps):
        step = Step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        for part in range(program.parts):
            wrapping.before(model, part)
            # Torch's own mode is slow: one step, in which nothing is done for the first time.
            how = None if not counted else "debug" if number == 1 else "calls"
            with counting(step.counts, how), data_on(engine.device):
                loss = program.loss(model, number * program.parts + part, rank)
                loss.backward()
            wrapping.after(model, part)
            step.losses.append([loss.detach()])
        program.between(model)
        parameters = {plain(name): p for name, p in model.named_parameters()}
        step.gradients = {name: snapshot(p.grad) for name, p in parameters.items()}
        optimizer.step()
        wrapping.after_optimizer(model)
        step.values = {name: p.detach().clone() for name, p in parameters.items()}
        trace.steps.append(step)
    return trace


class Calls(TorchDispatchMode):
    """Counts collectives as CommDebugMode does, by the operations that reach the dispatcher, and costs little."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(counts: dict[str, int], how: str | None) -> Iterator[None]:
    """Adds the collectives of a block of code to `counts`: as CommDebugMode sees them, as Calls does, or none."""
    if how is None:
        yield
        return
    mode = CommDebugMode() if how == "debug" else Calls()
    with mode:
        yield
    found = mode.counts if isinstance(mode, Calls) else {op.__name__: n for op, n in mode.get_comm_counts().items()}
    for name, count in found.items():
        counts[name] = counts.get(name, 0) + count


def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that a DTensor says of itself, except what is in it."""
    assert isinstance(tensor, DTensor), f"{type(tensor)} where a DTensor should be"
    mesh, meta = tensor.device_mesh, tensor._spec.tensor_meta
    assert meta is not None
    assert tensor.to_local().dtype == tensor.dtype == meta.dtype
    return (
        tensor.placements,
        mesh.device_type.replace("late", "cpu"),
        mesh.mesh.tolist(),
        mesh.mesh_dim_names,
        tuple(meta.shape),
        tuple(meta.stride),
        meta.dtype,
        tuple(tensor.to_local().shape),
    )


class Pieces:
    """This rank's pieces of tensors that stay as they are, as torch's own distribute_tensor cuts them."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, whole: torch.Tensor, like: DTensor) -> torch.Tensor:
        mesh, placements = like.device_mesh, like.placements
        key = (id(whole), mesh, placements)
        if key not in self.known:
            if any(isinstance(placement, _StridedShard) for placement in placements):
                piece = cut_strided(whole, like)
            else:
                piece = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            self.known[key] = (piece, whole)
        return self.known[key][0]


def cut_strided(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Along the last dimension of the mesh first, which distribute_tensor does not do."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for i, placement in reversed(list(enumerate(like.placements))):
        if isinstance(placement, (Shard, _StridedShard)):
            pieces = whole.chunk(like.device_mesh.size(i), placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = pieces[coordinate[i]] if coordinate[i] < len(pieces) else empty
    return whole


def assert_pieces(what: str, found: dict[str, Any], expected: dict[str, Any], pieces: Pieces) -> None:
    """Each is this rank's piece of what is expected, also whether there is one at all."""
    assert list(found) == list(expected), f"{what}: {list(found)} for {list(expected)}"
    for name, tensor in found.items():
        whole = expected[name]
        assert (tensor is None) == (whole is None), f"{what} of {name}: {tensor} for {whole}"
        if tensor is None:
            continue
        assert isinstance(tensor, DTensor), f"{what} of {name}: {type(tensor)}"
        assert tensor.shape == whole.shape, f"{what} of {name}: {tensor.shape} for {whole.shape}"
        unit = 1e-12 if tensor.dtype == torch.float64 else 1e-6
        piece, wanted = on_host(tensor), pieces.of(whole, tensor).cpu()
        assert piece.dtype == wanted.dtype and piece.shape == wanted.shape, f"{what} of {name}: {piece} for {wanted}"
        if not torch.allclose(piece, wanted, rtol=10 * unit, atol=unit):
            raise AssertionError(f"{what} of {name}: {piece} for {wanted}")


def assert_expected(trace: Trace, expected: Sequence[Step], rank: int, pieces: Pieces) -> None:
    assert len(trace.steps) == len(expected)
    for number, (step, alone) in enumerate(zip(trace.steps, expected, strict=True)):
        for part, losses in enumerate(alone.losses):
            torch.testing.assert_close(
                on_host(step.losses[part][0]), losses[rank], msg=lambda text, n=number: f"loss of step {n}: {text}"
            )
        assert_pieces(f"step {number}: the gradient", step.gradients, alone.gradients, pieces)
        assert_pieces(f"step {number}: the value", step.values, alone.values, pieces)


def assert_same_bits(mine: Trace, theirs: Trace) -> None:
    """Losses, gradients and values, and what their DTensors say of themselves."""
    assert len(mine.steps) == len(theirs.steps)
    for number, (a, b) in enumerate(zip(mine.steps, theirs.steps, strict=True)):
        for part, (one, other) in enumerate(zip(a.losses, b.losses, strict=True)):
            assert torch.equal(on_host(one[0]), on_host(other[0])), f"step {number}: the loss of part {part}"
        for what, found, wanted in (("gradient", a.gradients, b.gradients), ("value", a.values, b.values)):
            assert list(found) == list(wanted)
            for name, tensor in found.items():
                where, like = f"step {number}: the {what} of {name}", wanted[name]
                assert (tensor is None) == (like is None), where
                if tensor is None or like is None:
                    continue
                assert kind(tensor) == kind(like), f"{where}: {kind(tensor)} for {kind(like)}"
                assert torch.equal(on_host(tensor), on_host(like)), f"{where}: {local(tensor)} for {local(like)}"


class Parity:
    """Runs of one program that must agree with one process, and with torch's engine."""

    def __init__(
        self,
        program: Program,
        rank: int | None = None,
        ranks: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`rank` of `ranks` with data of their own; all ranks unless given."""
        self.program = program
        self.rank = dist.get_rank() if rank is None else rank
        self.ranks = dist.get_world_size() if ranks is None else ranks
        self.expected = train_alone(program, self.ranks, dtype)
        self.pieces = Pieces()

    def run(self, engine: Engine, wrapping: Wrapping | Wrap, counted: bool = False) -> Trace:
        """Of one engine, compared with one process."""
        if not isinstance(wrapping, Wrapping):
            wrapping = Wrapping(wrapping)
        trace = train(engine, self.program, wrapping, self.rank, counted)
        assert_expected(trace, self.expected, self.rank, self.pieces)
        return trace

    def both(self, wrapping: Wrapping | Wrap, exact: bool = True) -> Trace:
        """Ours, and torch's beside it. With more than two summands the order in which they are added may differ."""
        theirs = self.run(TORCH, wrapping)
        mine = self.run(ours(), wrapping)
        if exact:
            assert_same_bits(mine, theirs)
        return mine
