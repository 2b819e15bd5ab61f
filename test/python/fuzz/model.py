"""Random models: trees of small modules that take and give their tensors in containers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint


class Pair(NamedTuple):
    x: torch.Tensor
    side: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    side: torch.Tensor


@dataclass
class Opaque:
    """A dataclass that pytree does not know."""

    x: torch.Tensor
    side: torch.Tensor


pytree.register_dataclass(Record)

#: Opaque is for inputs only: torch finds no tensors in such an output and gathers no parameters for its backward.
GIVEN = ("tensor", "tuple", "list", "dict", "nested", "namedtuple", "dataclass")
TAKEN = (*GIVEN, "opaque", "keywords")


def pack(form: str, x: torch.Tensor, side: torch.Tensor) -> Any:
    forms = {
        "tuple": lambda: (x, side),
        "list": lambda: [x, side],
        "dict": lambda: {"x": x, "side": side},
        "nested": lambda: ({"deep": [x]}, (side, None, "text")),
        "namedtuple": lambda: Pair(x, side),
        "dataclass": lambda: Record(x, side),
        "opaque": lambda: Opaque(x, side),
    }
    return forms[form]() if form in forms else x


def unpack(payload: Any, side: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A payload that is one tensor leaves the side as it is; without one it is zero."""
    if isinstance(payload, (Record, Opaque)):
        return payload.x, payload.side
    if isinstance(payload, dict):
        return payload["x"], payload["side"]
    if isinstance(payload, torch.Tensor):
        return payload, torch.zeros_like(payload) if side is None else side
    first, second = payload
    return (first["deep"][0], second[0]) if isinstance(first, dict) else (first, second)


@dataclass
class Spec:
    """One module. `path` is its name in the model."""

    path: str
    kind: str
    takes: str = "tensor"
    gives: str = "tensor"
    dtype: torch.dtype = torch.float32
    hidden: int = 0
    has_spare: bool = False
    is_checkpointed: bool = False
    #: The input of a wide one is added to its output.
    skips: bool = False
    #: A leaf of the same shape whose weight this one has.
    tied_to: str = ""
    children: list[Spec] = field(default_factory=list)
    #: The children that run, by place, in order.
    order: list[int] = field(default_factory=list)
    optional: set[int] = field(default_factory=set)

    def walk(self) -> Iterator[Spec]:
        yield self
        for child in self.children:
            yield from child.walk()


class Node(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, payload: Any = None, **keywords: Any) -> Any:
        return pack(self.spec.gives, *self.compute(*unpack(keywords or payload)))

    def compute(self, x: torch.Tensor, side: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class Leaf(Node):
    """kind: linear, wide (two layers), scale (one parameter of one dimension), plain (none)."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__(spec)
        shapes = {
            "linear": {"weight": (width, width), "bias": (width,)},
            "wide": {"weight": (spec.hidden, width), "bias": (spec.hidden,), "back": (width, spec.hidden)},
            "scale": {"weight": (width,)},
            "plain": {},
        }[spec.kind]
        if spec.has_spare:
            shapes["spare"] = (3, width)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=spec.dtype) * 0.6))

    def compute(self, x: torch.Tensor, side: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.spec.kind == "plain":
            return torch.tanh(x), side
        x = x.to(self.weight.dtype)
        if self.spec.kind == "scale":
            out = x * self.weight
        elif self.spec.kind == "linear":
            out = torch.tanh(nn.functional.linear(x, self.weight, self.bias))
        else:
            out = torch.tanh(nn.functional.linear(x, self.weight, self.bias)) @ self.back.t()
            # A tensor is then used three times: twice here, and once for the side.
            out = x + out if self.spec.skips else out
        return out, side + 0.1 * out


class Group(Node):
    """Runs children; `order` says which, and changes from step to step."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__(spec)
        self.order = spec.order
        for child in spec.children:
            self.add_module(child.path.rpartition(".")[2], build(child, width))

    def compute(self, x: torch.Tensor, side: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        children = list(self.children())
        for place in self.order:
            child, spec = children[place], self.spec.children[place]
            if spec.takes == "keywords":
                got = child(x=x, side=side)
            elif spec.is_checkpointed:
                got = checkpoint(child, pack(spec.takes, x, side), use_reentrant=False)
            else:
                got = child(pack(spec.takes, x, side))
            x, side = unpack(got, side)
        return x, side


def build(spec: Spec, width: int) -> Node:
    return Group(spec, width) if spec.kind == "group" else Leaf(spec, width)


def build_model(spec: Spec, width: int, seed: int) -> Node:
    torch.manual_seed(seed)
    model = build(spec, width)
    for one in spec.walk():
        if one.tied_to:
            model.get_submodule(one.path).weight = model.get_submodule(one.tied_to).weight
    return model
