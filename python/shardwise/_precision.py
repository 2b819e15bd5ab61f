"""MixedPrecisionPolicy: the dtypes to compute and to sum in, for all parameters of a call and for single ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed.fsdp
from torch import nn

Override = Callable[[nn.Parameter], torch.dtype | None]


@dataclass(frozen=True)
class _MixedPrecisionPolicy(torch.distributed.fsdp.MixedPrecisionPolicy):
    """The dtypes to compute and to sum in, as torch's class of this name, with what torch 2.15 has added.

    `param_dtype_override_fn` is asked once for each parameter: its own dtype keeps it from being cast, None or
    `param_dtype` says that it is cast like the others. Inputs are cast to `param_dtype` all the same.

    >>> policy = shardwise.MixedPrecisionPolicy(
    ...     param_dtype=torch.bfloat16,
    ...     param_dtype_override_fn=lambda parameter: torch.float32 if parameter.ndim == 1 else None,
    ... )
    """

    param_dtype_override_fn: Override | None = field(default=None, kw_only=True)


_MixedPrecisionPolicy.__name__ = _MixedPrecisionPolicy.__qualname__ = "MixedPrecisionPolicy"

if TYPE_CHECKING:
    MixedPrecisionPolicy = _MixedPrecisionPolicy
else:
    _fields = torch.distributed.fsdp.MixedPrecisionPolicy.__dataclass_fields__
    #: torch's own class where it has all of this.
    MixedPrecisionPolicy = (
        torch.distributed.fsdp.MixedPrecisionPolicy if "param_dtype_override_fn" in _fields else _MixedPrecisionPolicy
    )


def override_of(policy: torch.distributed.fsdp.MixedPrecisionPolicy) -> Override | None:
    """The function for single parameters, if the policy has one."""
    return cast(Override | None, getattr(policy, "param_dtype_override_fn", None))


def own_dtype(
    policy: torch.distributed.fsdp.MixedPrecisionPolicy, parameter: torch.Tensor, name: str
) -> torch.dtype | None:
    """The dtype that the policy lets this parameter keep; None if it is computed with like the others."""
    choose = override_of(policy)
    chosen: Any = None if choose is None else choose(cast(nn.Parameter, parameter))
    if chosen is None or chosen == policy.param_dtype:
        return None
    if not isinstance(chosen, torch.dtype):
        raise ValueError(
            "shardwise: param_dtype_override_fn must return a torch.dtype or None but got "
            f"{type(chosen).__name__} for '{name}'."
        )
    if chosen != parameter.dtype:
        raise ValueError(
            "shardwise: param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype but "
            f"got {chosen} for '{name}' with dtype {parameter.dtype} and param_dtype {policy.param_dtype}."
        )
    return chosen


def of_parameter(
    policy: torch.distributed.fsdp.MixedPrecisionPolicy, own: torch.dtype | None
) -> torch.distributed.fsdp.MixedPrecisionPolicy:
    """The policy as it is for a parameter that is computed with in `own`."""
    if own is None:
        return policy
    changes: dict[str, Any] = {"param_dtype": own, "param_dtype_override_fn": None}
    return replace(policy, **changes)
