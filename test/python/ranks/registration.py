"""What a program sees of the parameters of two MLPs, as engines swap a sharded form and a full one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine import Engine
from models import batch, reference_backward
from parity import Pieces, assert_pieces, kind
from torch import nn
from torch.distributed.tensor import DTensor
from training_models import mlps


class TwoMlps:
    """The first one's layers, and the rest, are units, or all of it is one."""

    def __init__(self, engine: Engine, wrap: Any, width: int, several: bool) -> None:
        self.engine = engine
        self.model: Any = mlps(width, 2)
        self.reference: Any = mlps(width, 2)
        self.width = width
        self.names = [name for name, _ in self.model.named_parameters()]
        self.inner = [self.model[0].in_proj, self.model[0].out_proj] if several else []
        for module in [*self.inner, self.model]:
            assert wrap(module) is module
        self.sharded = dict(self.model.named_parameters())
        self.pieces = Pieces()

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(batch(step, rank, self.width)).pow(2).sum()

    def forward(self, step: int) -> torch.Tensor:
        loss = self.loss(self.model, step, dist.get_rank())
        torch.testing.assert_close(loss, self.loss(self.reference, step, dist.get_rank()))
        return loss

    def backward(self, step: int) -> None:
        self.forward(step).backward()
        reference_backward(dist.get_world_size(), lambda r: self.loss(self.reference, step, r))

    def reshard(self) -> None:
        for unit in [*self.inner, self.model]:
            unit.reshard()

    def of_inner(self, name: str) -> bool:
        return bool(self.inner) and name.startswith("0.")

    def look(self) -> dict[str, Any]:
        """What each parameter is at the moment: of a DTensor all it says, of a tensor that it is one."""
        return {
            name: kind(p) if isinstance(p, DTensor) else (type(p), tuple(p.shape), p.dtype, p.requires_grad)
            for name, p in self.model.named_parameters()
        }

    def assert_sharded(self) -> None:
        """Each is the very DTensor that it was when the model was wrapped, with this rank's piece."""
        parameters = dict(self.model.named_parameters())
        assert list(parameters) == self.names
        for name, parameter in parameters.items():
            assert parameter is self.sharded[name], name
            assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor), f"{name}: {type(parameter)}"
            kind(parameter)
        assert_pieces("sharded", parameters, dict(self.reference.named_parameters()), self.pieces)

    def assert_gradients(self) -> None:
        """Also of the members of modules, which are the same parameters."""
        assert self.model[0].in_proj.weight is dict(self.model.named_parameters())["0.in_proj.weight"]
        theirs = {name: p.grad for name, p in self.reference.named_parameters()}
        ours = {name: p.grad for name, p in self.model.named_parameters()}
        assert all(gradient is not None for gradient in theirs.values())
        assert_pieces("the gradient", ours, theirs, Pieces())
        for name, gradient in ours.items():
            assert kind(gradient) == kind(self.sharded[name]), name

    def assert_full(self, inner: bool, root: bool) -> None:
        """Full are those of the inner units, of the root, of both or of neither; all have the reference's values."""
        for (name, ours), theirs in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            full = inner if self.of_inner(name) else root
            assert isinstance(ours, nn.Parameter), name
            assert isinstance(ours, DTensor) != full, f"{name}: {type(ours)}, full: {full}"
            wanted = self.pieces.of(theirs, ours) if isinstance(ours, DTensor) else theirs
            assert torch.equal(ours.to_local() if isinstance(ours, DTensor) else ours, wanted), name
