"""local_optimizer(): steps at the cost of plain tensors, for optimizers that hold DTensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import islice
from operator import is_
from typing import Any, TypeVar

import torch
from torch import optim
from torch.autograd.graph import increment_version
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

O = TypeVar("O", bound=optim.Optimizer)  # noqa: E741

#: Optimizers that treat each element by itself: a step on a shard changes it as a step on the whole parameter would.
_ELEMENTWISE = (
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


def local_optimizer(optimizer: O, *, elementwise: bool = False) -> O:
    """Makes an optimizer of DTensors step on this rank's local tensors, at the cost of plain tensors.

    Returns the optimizer it was given; its class becomes Local<its name>. Everything else stays as it was:
    `param_groups` and `state` contain DTensors (those in `state` are made, around its memory, when somebody reads it).
    So state dicts, distributed checkpoints, hooks, clipping, gradient scaling and learning rate schedulers work
    unchanged.

    Args:
        optimizer: one that was just made: a learning rate scheduler comes after this.
        elementwise: set this for an optimizer other than torch's own if no element's step depends on other elements.
            One that uses norms or factors of whole parameters would use those of this rank's shards instead.

    >>> optimizer = shardwise.local_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"shardwise: local_optimizer(): optimizer must be a torch.optim.Optimizer, not {optimizer!r:.200}."
        )
    kind = type(optimizer)
    if kind in _made.values():
        return optimizer
    if not elementwise and kind not in _ELEMENTWISE:
        raise ValueError(
            f"shardwise: local_optimizer() does not know whether {kind.__name__} works element by element; one that "
            "looks at whole parameters would be wrong on shards. Pass elementwise=True if it does; otherwise use the "
            "optimizer without local_optimizer()."
        )
    if "step" in vars(optimizer):
        raise ValueError(
            f"shardwise: the step() of this {kind.__name__} was replaced already, by a learning rate scheduler for "
            "example, and would not become local. Call local_optimizer() right after the optimizer is made."
        )
    if optimizer.defaults.get("differentiable"):
        raise ValueError(
            f"shardwise: local_optimizer() cannot take a {kind.__name__} with differentiable=True: gradients through "
            "its step would be lost. Use the optimizer without local_optimizer()."
        )
    if kind not in _made:
        _made[kind] = _local_class(kind)
    optimizer.__class__ = _made[kind]
    return optimizer


_made: dict[type, type] = {}


def _local_class(kind: type) -> type:
    step: Any = kind.step  # type: ignore[attr-defined]
    # torch calls a step's hooks around it. They should see the DTensors, so they go around our step.
    inner = step.__wrapped__ if getattr(step, "hooked", False) else step

    def local_step(self: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return _step(self, inner, closure)

    local_step.__name__ = "step"
    local_step.__qualname__ = f"Local{kind.__name__}.step"
    hooked: Any = optim.Optimizer.profile_hook_step(local_step)
    hooked.hooked = True
    # A cached property is evaluated only while the optimizer has no attribute `state`.
    return type(f"Local{kind.__name__}", (kind,), {"step": hooked, "state": cached_property(_shown_state)})


class _Work:
    """Kept from step to step: the parameters, their local tensors on this rank, and the state by local tensor."""

    def __init__(self, parameters: list[torch.Tensor], locals: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.locals = locals
        self.state: defaultdict[Any, Any] = defaultdict(dict)

    def is_of(self, parameters: Sequence[torch.Tensor], locals: Sequence[torch.Tensor]) -> bool:
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and all(map(is_, locals, self.locals))
        )


def _step(self: optim.Optimizer, inner: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    groups: list[list[torch.Tensor]] = [group["params"] for group in self.param_groups]
    parameters = [parameter for group in groups for parameter in group]
    locals = [each._local_tensor if isinstance(each, DTensor) else each for each in parameters]
    work = _work_for(self, parameters, locals)
    changed, with_gradient = [], []
    attributes = vars(self)
    attributes["state"] = work.state
    try:
        parameter: Any
        for parameter, local in zip(parameters, locals, strict=True):
            gradient: Any = parameter.grad
            if gradient is None or local is parameter:
                continue
            with_gradient.append(local)
            changed.append(parameter)
            own = gradient._local_tensor
            is_plain = gradient._spec is parameter._spec and type(own) is torch.Tensor
            local.grad = own if is_plain else _local_gradient(gradient, parameter)
        rest = iter(locals)
        for group, shown in zip(self.param_groups, groups, strict=True):
            group["params"] = list(islice(rest, len(shown)))
        inner(self)
    finally:
        for group, shown in zip(self.param_groups, groups, strict=True):
            group["params"] = shown
        for local in with_gradient:
            local.grad = None
        # The step may have replaced the state object.
        work.state = attributes.pop("state")
        attributes["_work"] = work
        # As a step on the DTensors would: tells autograd and the engine that they were written to.
        increment_version(changed)
    return loss


def _work_for(self: optim.Optimizer, parameters: list[torch.Tensor], locals: list[torch.Tensor]) -> _Work:
    """What the last step kept; made anew if the state was read since then, or if the parameters changed."""
    attributes = vars(self)
    work: _Work | None = attributes.get("_work")
    if "state" not in attributes and work is not None and work.is_of(parameters, locals):
        return work
    shown = self.state
    made = _Work(parameters, locals)
    found = dict(zip(parameters, locals, strict=True))
    for key, entry in shown.items():
        local = found.get(key) if isinstance(key, torch.Tensor) else None
        if local is None or local is key:
            made.state[key] = entry
        else:
            made.state[local] = _convert(entry, partial(_hidden, key))
    return made


def _shown_state(self: optim.Optimizer) -> defaultdict[Any, Any]:
    """The state as programs see it: DTensors, keyed by the parameters. The next step starts from it."""
    work: _Work | None = vars(self).pop("_work", None)
    shown: defaultdict[Any, Any] = defaultdict(dict)
    if work is None:
        return shown
    found = dict(zip(work.locals, work.parameters, strict=True))
    for key, entry in work.state.items():
        parameter = found.get(key) if isinstance(key, torch.Tensor) else None
        if isinstance(parameter, DTensor):
            shown[parameter] = _convert(entry, partial(_around, parameter, key.size()))
        else:
            shown[key] = entry
    return shown


def _convert(entry: Any, convert: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """The state of one parameter with each tensor converted."""
    if isinstance(entry, torch.Tensor):
        return convert(name, entry)
    if isinstance(entry, dict):
        return {key: _convert(value, convert, str(key)) for key, value in entry.items()}
    if type(entry) in (list, tuple):
        return type(entry)(_convert(value, convert, name) for value in entry)
    return entry


def _hidden(parameter: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    if not _lies_as(value, parameter):
        raise ValueError(
            f"shardwise: the optimizer's state '{name}' of a parameter of shape {tuple(parameter.shape)} has the "
            f"placements {value.placements} on {value.device_mesh}, but the parameter has {parameter.placements} on "
            f"{parameter.device_mesh}; a local step needs them to be equal. Load the state through "
            "torch.distributed.checkpoint, or redistribute() it."
        )
    return value._local_tensor


def _around(parameter: DTensor, size: torch.Size, name: str, value: torch.Tensor) -> torch.Tensor:
    # A tensor of another size is not a shard. Scalars, such as step counts, are the same on all ranks.
    if value.size() != size or value.dim() == 0:
        return value
    spec, meta = parameter._spec, parameter._spec.tensor_meta
    if meta is not None and meta.dtype != value.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, value.dtype))
    return DTensor(value, spec, requires_grad=False)


def _lies_as(tensor: DTensor, parameter: DTensor) -> bool:
    mine, wanted = tensor._spec, parameter._spec
    return mine is wanted or (mine.placements == wanted.placements and mine.mesh == wanted.mesh)


def _local_gradient(gradient: Any, parameter: Any) -> torch.Tensor:
    if not _lies_as(gradient, parameter):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    local: torch.Tensor = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
