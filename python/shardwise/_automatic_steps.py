"""Local steps of every optimizer that holds parameters of ours: what set_local_optimizers() turns on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import _C, _local_switch
from shardwise._local_step import ELEMENTWISE, NotLocalError, step_locally

Closure = Callable[[], Any]


@cache
def watch() -> None:
    """From now on each step of an optimizer begins with a look at what it holds."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(
    optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gives torch's step a closure that makes the whole step, and an optimizer that holds nothing.

    So our step comes where torch's would: between the hooks, without gradients, and inside of what schedulers and
    scalers put around it. Only `args[0]`, which later hooks get beside the optimizer, is another one.
    """
    kind: Any = type(optimizer)
    if not _local_switch.enabled or kind not in _ELEMENTWISE or torch.compiler.is_compiling():
        return None
    closure = args[1] if len(args) == 2 else kwargs.get("closure")
    is_usual = args[0] is optimizer and len(args) + len(kwargs) <= 2 and kwargs.keys() <= {"closure"}
    if not is_usual or optimizer.defaults.get("differentiable") or not _holds_ours(optimizer):
        return None
    step = _torchs_step(kind, kind.step)
    if step is None:
        return None
    return (_empty(kind), partial(_step, optimizer, step, closure)), {}


_ELEMENTWISE = frozenset(ELEMENTWISE)


def _step(optimizer: optim.Optimizer, step: Callable[..., Any], closure: Closure | None) -> Any:
    loss = None if closure is None else closure()
    with torch.no_grad():
        try:
            # A learning rate, for one, that is a DTensor does not go together with local tensors.
            if not any(DTensor in map(type, group.values()) for group in optimizer.param_groups):
                step_locally(optimizer, step, type(optimizer), exactly=True)
                return loss
        except NotLocalError:
            pass
        step(optimizer)
    return loss


def _holds_ours(optimizer: optim.Optimizer) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and _C.has_unit(parameter):
                return True
    return False


@cache
def _torchs_step(kind: type, step: Any) -> Callable[..., Any] | None:
    """torch's own function below what torch puts around steps. None if there is something else around it, or below."""
    folder = Path(torch.__file__).parent
    while True:
        code = getattr(step, "__code__", None)
        if code is None or not Path(code.co_filename).is_relative_to(folder):
            return None
        if not hasattr(step, "__wrapped__"):
            return step if Path(code.co_filename).parent == folder / "optim" else None
        step = step.__wrapped__


@cache
def _empty(kind: Any) -> optim.Optimizer:
    """An optimizer whose step() does nothing but call the closure."""
    made: Any = kind.__new__(kind)
    vars(made).update(defaults={"differentiable": False}, state={}, param_groups=[])
    # The step that the closure makes has this done by the optimizer itself.
    made._accelerator_graph_capture_health_check = lambda: None
    return made  # type: ignore[no-any-return]
