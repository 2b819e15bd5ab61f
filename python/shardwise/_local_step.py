"""One step of an optimizer that holds DTensors, made on this rank's local tensors.

Nothing is kept from step to step: whatever a program changes, replaces or frees in between is as if it had always been
so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import optim
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

#: Optimizers that treat each element by itself: a step on a shard changes it as a step on the whole parameter would.
ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class NotLocalError(ValueError):
    """A step cannot be made on local tensors. Nothing was changed."""


def step_locally(optimizer: optim.Optimizer, step: Callable[..., Any], kind: type, *, exactly: bool = False) -> None:
    """Calls `step(optimizer)`, the step of the class `kind`, while the optimizer holds local tensors.

    Then, also if the step raises, it holds its DTensors again. DTensors and dicts in its state stay the same objects;
    new DTensors are around the memory of what the step made. With `exactly`, raises NotLocalError for what would be
    another computation or another state than that of a step on the DTensors.
    """
    shown: Any = optimizer.state
    groups: list[tuple[dict[str, Any], list[torch.Tensor]]] = [(g, g["params"]) for g in optimizer.param_groups]
    attributes = vars(optimizer)
    locals = _Locals(exactly)
    try:
        # Looking for a __torch_function__ of DTensors takes longer than reading their attributes.
        with torch._C.DisableTorchFunctionSubclass():
            taken = [locals.take(parameters, shown) for _, parameters in groups]
        locals.complete(shown)
        for (group, _), mine in zip(groups, taken, strict=True):
            group["params"] = mine
        attributes["state"] = locals.state
        step(optimizer)
    finally:
        for group, parameters in groups:
            group["params"] = parameters
        # The step may have replaced the state object.
        after, attributes["state"] = attributes["state"], shown
        for parameter in locals.changed:
            parameter._local_tensor.grad = None
        # Where nothing was stepped, all is put back as for torch's own.
        is_all = locals.restore(after, kind in ELEMENTWISE or after is shown)
        if after is not shown:
            if not is_all:
                locals.show(after, shown)
            # As a step on the DTensors would: tells autograd and the engine that they were written to.
            torch._C._increment_version(locals.changed)


class _Locals:
    """What the optimizer holds during a step, in the place of its DTensors."""

    def __init__(self, exactly: bool) -> None:
        #: By local tensor. The entries are the program's own dicts.
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        #: The DTensors that have gradients.
        self.changed: list[DTensor] = []
        self._exactly = exactly
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        #: The state's entries for DTensors, and how many entries and names there are.
        self._entries: list[dict[Any, Any]] = []
        self._sizes: list[int] = []
        #: What an optimizer has there that is no dict.
        self._odd: dict[torch.Tensor, Any] = {}
        #: Entry, name, and the DTensor that the program sees there.
        self._hidden: list[tuple[dict[Any, Any], Any, DTensor]] = []
        #: The same for what is no tensor, and what the step sees.
        self._others: list[tuple[dict[Any, Any], Any, Any, Any]] = []

    def take(self, group: list[torch.Tensor], shown: dict[Any, Any]) -> list[torch.Tensor]:
        """The tensors that take the place of these, with their gradients and their state.

        The checks are written out, since calls would double the time of all this.
        """
        mine: list[torch.Tensor] = []
        state, changed, hidden = self.state, self.changed, self._hidden
        Plain, Distributed = torch.Tensor, DTensor  # locals are found faster
        seen = None
        for parameter in group:
            if not isinstance(parameter, Distributed):
                mine.append(parameter)
                continue
            local, spec, gradient = parameter._local_tensor, parameter._spec, parameter.grad
            mesh, placements = spec.mesh, spec.placements
            if placements is not seen:
                _refuse_sums(parameter)
                seen = placements
            mine.append(local)
            if gradient is not None:
                changed.append(parameter)
                own, its = (gradient._local_tensor, gradient._spec) if type(gradient) is Distributed else (None, spec)
                lies = its is spec or (its.mesh is mesh and its.placements == placements)
                local.grad = own if lies and type(own) is Plain else _local_gradient(gradient, parameter)
            entry = shown.get(parameter)
            if not isinstance(entry, dict):
                if entry is not None:
                    self._odd[local] = _convert(entry, partial(_local_state, parameter))
                continue
            state[local] = entry
            for name, value in entry.items():
                if type(value) is Distributed:
                    its = value._spec
                    if its is not spec and (its.mesh is not mesh or its.placements != placements):
                        _check_state(parameter, name, value)
                    entry[name] = value._local_tensor
                    hidden.append((entry, name, value))
                elif type(value) is not Plain:
                    self._take_other(parameter, entry, name)
        self._groups.append((group, mine))
        if self._exactly and not (_PLAIN.issuperset(map(type, mine)) and all(map(torch.Tensor.dim, mine))):
            self._refuse_others()
        return mine

    def _take_other(self, parameter: DTensor, entry: dict[Any, Any], name: Any) -> None:
        value = entry[name]
        entry[name] = mine = _convert(value, partial(_local_state, parameter), str(name))
        self._others.append((entry, name, value, mine))

    def _refuse_others(self) -> None:
        # torch chooses kernels by the class of a tensor. And a scalar's state looks like a count of steps.
        for _, mine in self._distributed():
            if type(mine) is not torch.Tensor or mine.dim() == 0:
                raise NotLocalError(
                    f"shardwise: a local step of a {type(mine).__name__} of shape {tuple(mine.shape)} may differ."
                )

    def _distributed(self) -> Iterator[tuple[DTensor, torch.Tensor]]:
        """The DTensors that were taken, with their local tensors."""
        for group in self._groups:
            for parameter, mine in zip(*group, strict=True):
                if isinstance(parameter, DTensor):
                    yield parameter, mine

    def complete(self, shown: dict[Any, Any]) -> None:
        """To be called when all groups are taken: adds the state that is not of their DTensors."""
        self._entries = [*self.state.values()]
        self.state.update(self._odd)
        if len(self.state) < len(shown):
            taken = {parameter for parameter, _ in self._distributed()}
            self.state.update((key, entry) for key, entry in shown.items() if key not in taken)
        self._sizes = [len(self.state), *map(len, self._entries)]

    def restore(self, after: dict[Any, Any], is_torchs: bool) -> bool:
        """Puts back what was taken out of the state. False if the step also made state, or replaced some.

        torch's optimizers neither rename state nor have lists and dicts in it. Of others all is looked at.
        """
        is_all = is_torchs and [len(after), *map(len, self._entries)] == self._sizes
        for entry, name, value in self._hidden:
            if entry.get(name) is value._local_tensor:
                entry[name] = value
            else:
                is_all = False
        for entry, name, value, mine in self._others:
            if entry.get(name) is not mine:
                is_all = False
            elif is_torchs or not isinstance(mine, (dict, list, tuple)):
                entry[name] = value
        return is_all

    def show(self, after: dict[Any, Any], shown: dict[Any, Any]) -> None:
        """Brings what the step put into the state, or took out of it, to the state that the program sees."""
        owners = {mine: parameter for parameter, mine in self._distributed()}
        kept = set()
        for key, entry in after.items():
            parameter = owners.get(key) if isinstance(key, torch.Tensor) else None
            kept.add(key if parameter is None else parameter)
            if parameter is None:
                shown[key] = entry
                continue
            converted = _convert(entry, partial(_around, parameter, key.size()))
            if isinstance(entry, dict):
                entry.update(converted)
                converted = entry
            shown[parameter] = converted
        for key in shown.keys() - kept:
            del shown[key]


def _refuse_sums(parameter: DTensor) -> None:
    if any(each.is_partial() for each in parameter.placements):
        raise NotLocalError(
            f"shardwise: a parameter of shape {tuple(parameter.shape)} has the placements {parameter.placements}: each "
            "rank has a part of a sum, and a step on the parts is not a step on the sum. redistribute() it."
        )


def _convert(entry: Any, convert: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """The state of one parameter with each tensor converted."""
    if isinstance(entry, torch.Tensor):
        return convert(name, entry)
    if isinstance(entry, dict):
        return {key: _convert(value, convert, str(key)) for key, value in entry.items()}
    if type(entry) in (list, tuple):
        return type(entry)(_convert(value, convert, name) for value in entry)
    return entry


def _local_state(parameter: DTensor, name: str, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    _check_state(parameter, name, value)
    return value._local_tensor


def _check_state(parameter: DTensor, name: str, value: DTensor) -> None:
    if not _lies_as(value, parameter):
        raise NotLocalError(
            f"shardwise: the optimizer's state '{name}' of a parameter of shape {tuple(parameter.shape)} has the "
            f"placements {value.placements} on {value.device_mesh}, but the parameter has {parameter.placements} on "
            f"{parameter.device_mesh}; a local step needs them to be equal. Load the state through "
            "torch.distributed.checkpoint, or redistribute() it."
        )


def _around(parameter: DTensor, size: torch.Size, name: str, value: torch.Tensor) -> torch.Tensor:
    # A tensor of another size is not a shard. Scalars, such as step counts, are the same on all ranks.
    if isinstance(value, DTensor) or value.size() != size or value.dim() == 0:
        return value
    spec, meta = parameter._spec, parameter._spec.tensor_meta
    if meta is not None and meta.dtype != value.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, value.dtype))
    return DTensor(value, spec, requires_grad=False)


def _lies_as(tensor: DTensor, parameter: DTensor) -> bool:
    mine, wanted = tensor._spec, parameter._spec
    return mine is wanted or (
        mine.placements == wanted.placements and (mine.mesh is wanted.mesh or mine.mesh == wanted.mesh)
    )


def _local_gradient(gradient: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor):
        raise NotLocalError(
            f"shardwise: a parameter of shape {tuple(parameter.shape)} is a DTensor, but its gradient is a "
            f"{type(gradient).__name__}. Give it a DTensor, for example by DTensor.from_local()."
        )
    if not _lies_as(gradient, parameter):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
