"""Finds optimizers whose parameters no longer get gradients."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

#: Parameters that gradients do not reach, with their description for the error: the originals of wrapped modules, and
#: the full parameters that modules hold at times.
_untrained = WeakTensorKeyDictionary()

#: Optimizers that were checked, with their number of parameters then.
_looked_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def note(name: str, before: nn.Parameter, full: nn.Parameter) -> None:
    """Notes that gradients reach neither the original parameter nor the one that the module computes with."""
    _untrained[before] = f"'{name}' as it was before its module was wrapped"
    _untrained[full] = f"the full '{name}', which stands in its module between forward and backward"


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises RuntimeError before a step that would silently train nothing."""
    if torch.compiler.is_compiling():
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _looked_at.get(optimizer) == count:
        return
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        # A parameter with a gradient is trained some other way: a program may use it outside its module.
        if parameter.requires_grad and parameter.grad is None and parameter in _untrained:
            raise RuntimeError(
                f"shardwise: this {type(optimizer).__name__} holds {_untrained[parameter]}. That tensor gets no "
                "gradients, so the optimizer would train nothing. Make it from the parameters() of the wrapped model, "
                "before its first forward or after its reshard()."
            )
    _looked_at[optimizer] = count


register_optimizer_step_pre_hook(_check)
