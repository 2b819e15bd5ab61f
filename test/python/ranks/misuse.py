"""Cases of wrong use: what is done, the error that tells of it, and that the modules stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from engine import Engine
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Error:
    """An exception of exactly this type, whose text has this fragment."""

    kind: type[BaseException]
    fragment: str

    def problem(self, seen: BaseException | None) -> str:
        if seen is None:
            return f"raised nothing, for {self}"
        if not isinstance(seen, self.kind) or self.fragment not in str(seen):
            return f"raised {type(seen).__name__}: {seen}, for {self}"
        return ""


@dataclass(frozen=True)
class Case:
    """`ours` is None where ours does what torch refuses; `torch` is None where torch raises nothing."""

    name: str
    do: Callable[[Engine, Watch], Any]
    ranks: int
    ours: Error | None
    torch: Error | None
    torch_keeps: bool

    def problems(self, engine: Engine) -> list[str]:
        watch = Watch()
        seen: BaseException | None = None
        try:
            self.do(engine, watch)
        except Exception as error:
            seen = error
        is_torch = engine.name == "torch"
        wanted = self.torch if is_torch else self.ours
        problem = (f"raised {seen!r}" if seen else "") if wanted is None else wanted.problem(seen)
        found = [problem] if problem else []
        if wanted is not None and (self.torch_keeps or not is_torch):
            found += watch.changes()
        return [f"{self.name}: {one}" for one in found]


class Watch:
    """Notes modules as they are; told once more, the last note counts."""

    def __init__(self) -> None:
        self._notes: dict[nn.Module, dict[str, Any]] = {}

    def __call__(self, module: Any) -> Any:
        for one in module if isinstance(module, list) else [module]:
            self._notes[one] = _note(one)
        return module

    def changes(self) -> list[str]:
        return [
            f"{what} was {then[what]} and is {now.get(what)}"
            for module, then in self._notes.items()
            for now in [_note(module)]
            for what in then
            if now.get(what) != then[what]
        ]


def _note(module: nn.Module) -> dict[str, Any]:
    note: dict[str, Any] = {"names": [name for name, _ in module.named_parameters(remove_duplicate=False)]}
    for name, one in module.named_modules():
        note[f"class of '{name}'"] = type(one)
        note[f"hooks of '{name}'"] = (len(one._forward_pre_hooks), len(one._forward_hooks))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        values = None if local.is_meta else local.detach().flatten().tolist()
        note[f"parameter {name}"] = (id(parameter), type(parameter), parameter.requires_grad, values)
    return note


#: In the order of the files.
CASES: list[Case] = []


def case(
    kind: type[BaseException],
    fragment: str,
    *,
    ranks: int = 1,
    ours_only: tuple[type[BaseException], str] | bool = False,
    torch_only: bool = False,
    torch_keeps: bool = True,
) -> Callable[[Callable[[Engine, Watch], Any]], Callable[[Engine, Watch], Any]]:
    """The error of both engines. ours_only: torch raises nothing (True) or this, which helps nobody. torch_only: ours
    does what was asked. torch_keeps=False: torch leaves the modules half changed, ours does not."""

    def register(do: Callable[[Engine, Watch], Any]) -> Callable[[Engine, Watch], Any]:
        error = Error(kind, fragment)
        theirs = error if not ours_only else None if ours_only is True else Error(*ours_only)
        CASES.append(Case(do.__name__, do, ranks, None if torch_only else error, theirs, torch_keeps))
        return do

    return register


def two_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def data() -> torch.Tensor:
    return torch.linspace(-1, 1, 6).view(2, 3)
