"""local_optimizer(): steps at the cost of plain tensors, for optimizers that hold DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import optim

from shardwise._local_step import ELEMENTWISE, step_locally

O = TypeVar("O", bound=optim.Optimizer)  # noqa: E741


def local_optimizer(optimizer: O, *, elementwise: bool = False) -> O:
    """Makes an optimizer of DTensors step on this rank's local tensors, at the cost of plain tensors.

    Returns the same optimizer, whose class becomes Local<its name>. Everything else stays as it was:
    `param_groups` and `state` contain DTensors, except while a step runs. So state dicts, distributed checkpoints,
    hooks, clipping, gradient scaling and learning rate schedulers work unchanged. set_local_optimizers() does the same
    for all of torch's optimizers at once.

    Args:
        optimizer: a new optimizer. Make its learning rate scheduler after this call.
        elementwise: set this for an optimizer that is not torch's own, if the step of an element depends on no other
            element. An optimizer that uses norms of whole parameters would use those of this rank's shards.

    >>> optimizer = shardwise.local_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"shardwise: local_optimizer(): optimizer must be a torch.optim.Optimizer, not {optimizer!r:.200}."
        )
    kind = type(optimizer)
    if kind in _made.values():
        return optimizer
    if not elementwise and kind not in ELEMENTWISE:
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_locally(self, inner, kind)
        return loss

    local_step.__name__ = "step"
    local_step.__qualname__ = f"Local{kind.__name__}.step"
    hooked: Any = optim.Optimizer.profile_hook_step(local_step)
    hooked.hooked = True
    return type(f"Local{kind.__name__}", (kind,), {"step": hooked})
