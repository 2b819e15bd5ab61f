"""What differs between the versions of torch that shardwise runs with, chosen by what their modules have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed.fsdp
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


class _NoHandle:
    """Stands for a class that this torch does not have."""


if TYPE_CHECKING:
    TorchsGradientReductionHandle = torch.distributed.fsdp.GradientReductionHandle
else:
    #: What torch's finalize_backward() returns, since torch 2.15.
    TorchsGradientReductionHandle = getattr(torch.distributed.fsdp, "GradientReductionHandle", _NoHandle)


#: Enters a process group into torch's tables; it has another name since torch 2.12.
register_process_group: Callable[..., None] = (
    vars(distributed_c10d).get("_register_pg_in_world") or vars(distributed_c10d)["_update_process_group_global_state"]
)


def set_param_groups(state: FSDPState, groups: Sequence[Any]) -> None:
    """Gives a state its groups of parameters. Torch knows one alone before version 2.12."""
    vars(state)["_fsdp_param_groups"] = list(groups)
    if not isinstance(getattr(FSDPState, "_fsdp_param_group", None), property):
        vars(state)["_fsdp_param_group"] = groups[0]


def own_grad_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """The dtype of its gradient, where the program set another one than the parameter's own."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return None if dtype == parameter.dtype else dtype


def reduce_dtype(precision: MixedPrecisionPolicy) -> torch.dtype | None:
    """The dtype of sums; None: that of the parameters. Torch up to 2.14 sums in `param_dtype` if none is given.

    Not where some parameters keep their dtype, which is newer.
    """
    keeps_some = getattr(precision, "param_dtype_override_fn", None) is not None
    if precision.reduce_dtype is None and not keeps_some and not hasattr(FSDPParam, "unsharded_grad_dtype"):
        return precision.param_dtype
    return precision.reduce_dtype
