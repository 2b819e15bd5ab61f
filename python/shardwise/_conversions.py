"""What happens to the inputs and outputs of a wrapped module's calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.utils import _apply_to_tensors, _to_kwargs


def conversions(precision: MixedPrecisionPolicy, device: torch.device) -> tuple[Any, Any]:
    """Functions that convert a call's inputs and its outputs; None if there is nothing to do."""
    inputs = []
    if device.type != "cpu":
        inputs.append(partial(_moved, device))
    if precision.cast_forward_inputs and precision.param_dtype is not None:
        inputs.append(partial(_cast_inputs, precision.param_dtype))

    def convert(args: Any, kwargs: Any) -> tuple[Any, Any]:
        for step in inputs:
            args, kwargs = step(args, kwargs)
        return args, kwargs

    outputs = None
    if precision.output_dtype is not None:
        outputs = partial(_apply_to_tensors, partial(_cast_fp_tensor, precision.output_dtype))
    return convert if inputs else None, outputs


def _moved(device: torch.device, args: Any, kwargs: Any) -> tuple[Any, Any]:
    moved, keywords = _to_kwargs(args, kwargs, device, False)
    return moved[0], keywords[0]


def _cast_inputs(dtype: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
    cast = partial(_cast_fp_tensor, dtype)
    return _apply_to_tensors(cast, args), _apply_to_tensors(cast, kwargs)
