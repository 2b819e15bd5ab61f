"""What an optimizer keeps, under the names of its parameters, for checkpoints.

As torch's get_optimizer_state_dict() flattens them: state.<parameter>.exp_avg and param_groups.<parameter>.lr. Options
are tensors, as in checkpoints of C++ programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from shardwise import _C
from shardwise._saved_tensors import Pieces, Saved, lies_as, like, local_of

PREFIX = "optimizer."
STATE = f"{PREFIX}state."
OPTIONS = f"{PREFIX}param_groups."
#: Options that say how a step is computed, not what, or follow from the class: each program's own.
OWN_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
#: Those that optimizers of C++ do not have.
ONLY_PYTHON = {"maximize"}


@dataclass(frozen=True)
class Named:
    """A parameter of an optimizer, by its name in the model."""

    name: str
    parameter: torch.Tensor
    #: The key of its state, and the index of its group, in the optimizer's state dict.
    key: int
    group: int


class SavedOptimizer:
    """An optimizer as a checkpoint has it."""

    def __init__(self, optimizer: optim.Optimizer, names: Mapping[int, str], make: Pieces) -> None:
        """`names` of the model's parameters, by id."""
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(f"shardwise: optimizer must be a torch.optim.Optimizer, not {optimizer!r:.200}.")
        self._make = make
        self.optimizer = optimizer
        self.packed: dict[str, Any] = optimizer.state_dict()
        self.parameters: list[Named] = []
        for index, (group, packed) in enumerate(zip(optimizer.param_groups, self.packed["param_groups"], strict=True)):
            for parameter, key in zip(group["params"], packed["params"], strict=True):
                if id(parameter) not in names:
                    raise ValueError(
                        f"shardwise: the optimizer has a parameter of shape {list(parameter.shape)}, in its group "
                        f"{index}, that the model does not have, so it has no name in a checkpoint. Give the model "
                        "that the optimizer was made for, and make the optimizer after the model is wrapped."
                    )
                self.parameters.append(Named(names[id(parameter)], parameter, key, index))

    # Saving

    def pieces(self) -> tuple[list[_C.Piece], dict[str, Any]]:
        """This rank's pieces, and what are no tensors."""
        pieces: list[_C.Piece] = []
        values: dict[str, Any] = {}
        options = [self._options(group) for group in range(len(self.packed["param_groups"]))]
        for named in self.parameters:
            for option, value in options[named.group].items():
                name = f"{OPTIONS}{named.name}.{option}"
                if isinstance(value, str):
                    values[name] = value
                else:
                    pieces.append(_C.Piece(name, list(value.shape), self._make.boxes(value), value))
            pieces += self._state_pieces(named, values)
        return pieces, values

    def _state_pieces(self, named: Named, values: dict[str, Any]) -> Iterator[_C.Piece]:
        parameter = named.parameter
        boxes = self._make.boxes(parameter)
        for kept, value in self.packed["state"].get(named.key, {}).items():
            name = f"{STATE}{named.name}.{kept}"
            if not isinstance(value, torch.Tensor):
                if value is not None:
                    values[name] = _plain(name, value)
            elif lies_as(value, parameter):
                yield _C.Piece(name, list(value.shape), boxes, local_of(name, value), not isinstance(value, DTensor))
            else:
                _check_state(name, parameter, value)
                yield self._make.of(name, value)

    def _options(self, group: int) -> dict[str, Any]:
        """As tensors, but for texts."""
        found = {}
        for name, value in self.packed["param_groups"][group].items():
            if name not in OWN_OPTIONS and value is not None:
                found[name] = value if isinstance(value, str) else _option_tensor(name, value)
        return found

    # Loading

    def fit(self, saved: Saved) -> tuple[set[str], list[str], list[str]]:
        """The names of the checkpoint that this optimizer takes; what is missing there; and what does not fit."""
        known, missing, wrong = set(), [], []
        by_parameter = self._saved_names(saved)
        defaults = list(self._defaults())
        for named in self.parameters:
            names = by_parameter.get(named.name, {})
            known |= set(names.values())
            missing += [f"{OPTIONS}{named.name}.{option}" for option in defaults if f"{OPTIONS}{option}" not in names]
            for short, name in names.items():
                if name not in saved.tensors or not short.startswith(STATE):
                    continue
                sizes = saved.tensors[name][1]
                if sizes and sizes != list(named.parameter.shape):
                    wrong.append(f"'{name}' has shape {sizes}, but the parameter {list(named.parameter.shape)}")
        return known, missing, wrong

    def read(self, saved: Saved) -> None:
        """Sets what the optimizer keeps, and its options, to the checkpoint's."""
        by_parameter = self._saved_names(saved)
        groups = [dict(group) for group in self.packed["param_groups"]]
        state: dict[int, dict[str, Any]] = {}
        found = [
            (named, short, name)
            for named in self.parameters
            for short, name in by_parameter.get(named.name, {}).items()
        ]
        # Files have larger dtypes first, so what is read one after the other lies side by side.
        options = [each for each in found if each[1].startswith(OPTIONS)]
        for named, short, name in sorted(options, key=lambda each: -saved.item_size(each[2])):
            last = short.removeprefix(OPTIONS)
            if last not in OWN_OPTIONS:
                group = groups[named.group]
                group[last] = _option_like(group.get(last), saved.read(name))
        for named, short, name in found:
            if short.startswith(STATE):
                values = self._read_state(saved, name, named.parameter)
                state.setdefault(named.key, {})[short.removeprefix(STATE)] = values
        self.optimizer.load_state_dict({**self.packed, "state": state, "param_groups": groups})

    def _read_state(self, saved: Saved, name: str, parameter: torch.Tensor) -> Any:
        if name not in saved.tensors or (parameter.dim() and not saved.tensors[name][1]):
            return saved.read(name)
        values = torch.empty(local_of(name, parameter).shape, dtype=saved.tensors[name][0], device="meta")
        return like(parameter, saved.folder.read_piece(self._make.like(name, parameter, values)))

    def _saved_names(self, saved: Saved) -> dict[str, dict[str, str]]:
        """For each parameter of the optimizer the names that the checkpoint has, by kind and last part."""
        known = {named.name for named in self.parameters}
        found: dict[str, dict[str, str]] = {}
        for name in [*saved.tensors, *saved.values]:
            for kind in (STATE, OPTIONS):
                parameter, _, last = name.removeprefix(kind).rpartition(".")
                if name.startswith(kind) and parameter in known:
                    found.setdefault(parameter, {})[f"{kind}{last}"] = name
        return found

    def _defaults(self) -> Iterable[str]:
        """The options that a checkpoint must have."""
        for name, value in self.optimizer.defaults.items():
            if name not in OWN_OPTIONS | ONLY_PYTHON and value is not None:
                yield name


def _check_state(name: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
    is_cut = isinstance(parameter, DTensor) and not all(each.is_replicate() for each in parameter.placements)
    if value.dim() and is_cut and (not isinstance(value, DTensor) or value.shape != parameter.shape):
        raise ValueError(
            f"shardwise: '{name}' cannot be part of a checkpoint: its parameter is sharded, and it is not a DTensor of "
            "the parameter's shape, so this rank's part of it is unknown. Save this optimizer's state "
            "by yourself, with tensors={...} under names of their own."
        )


def _option_tensor(name: str, value: Any) -> torch.Tensor:
    """As C++ programs save it: a truth value, or doubles."""
    if isinstance(value, torch.Tensor):
        return value.detach().double() if value.is_floating_point() else value.detach()
    if isinstance(value, bool):
        return torch.tensor(value)
    many = value if isinstance(value, (tuple, list)) else (value,)
    if not many or not all(isinstance(each, (int, float, torch.Tensor)) for each in many):
        raise ValueError(
            f"shardwise: '{name}' cannot be part of a checkpoint: options are numbers, texts or truth values, or "
            f"numbers in a tuple, but this is {value!r:.80}. Take it out of the group while you save."
        )
    doubles = torch.tensor([float(each) for each in many], dtype=torch.double)
    return doubles if many is value else doubles[0]


def _option_like(before: Any, saved: Any) -> Any:
    """What was saved, in the type that the option had."""
    if not isinstance(saved, torch.Tensor):
        return saved
    if isinstance(before, torch.Tensor):
        return saved.to(before.device, before.dtype)
    value: Any = saved.tolist()
    if isinstance(value, list):
        return value if isinstance(before, list) else tuple(value)
    # Options of whole numbers are saved as others are.
    return int(value) if type(before) is int and value == int(value) else value


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(
        f"shardwise: '{name}' cannot be part of a checkpoint: an optimizer's state may be tensors, numbers and texts, "
        f"but this is {type(value).__name__}. Save this optimizer's state by yourself."
    )
