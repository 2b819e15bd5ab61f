"""C++ modules that torch::python::bind_module exposes to Python, for fully_shard() and replicate().

Both functions accept what bind_module makes (an nn.Module around the C++ module), and C++ modules themselves, such as
inner modules. After fully_shard() parameters() are this rank's shards, as plain tensors for the optimizer. Torch's own
tools would take them for whole parameters, so this module has functions for state dicts and for clipping.

>>> model = my_extension.Model()
>>> for block in model.blocks():
...     shardwise.fully_shard(block)
>>> shardwise.fully_shard(model)
>>> optimizer = torch.optim.AdamW(model.parameters())
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from shardwise import _C, _cpp_wrapping
from shardwise._C import Mesh
from shardwise._cpp_modules import inner, is_cpp
from shardwise._cpp_parallelism import (
    Pipeline,
    PipelineOptions,
    PipelineResult,
    colwise,
    parallelize,
    rowwise,
    sequence,
    vocabulary,
)


def as_module(module: Any) -> nn.Module:
    """An nn.Module around a C++ module; it has the methods of FSDPModule if the C++ module was wrapped.

    >>> shardwise.cpp.as_module(model.block(0)).unshard()
    """
    return _cpp_wrapping.as_module(inner(module))


def full_state_dict(module: Any, *, rank0_only: bool = False, cpu_offload: bool = False) -> dict[str, torch.Tensor]:
    """Returns copies of all parameters and buffers as whole tensors. All ranks must call it.

    >>> torch.save(shardwise.cpp.full_state_dict(model), path)
    """
    return _C.full_state_dict(inner(module), rank0_only=rank0_only, cpu_offload=cpu_offload)


@dataclass(frozen=True)
class LoadResult:
    """Names that only the module has, names that only the dict has, and how many elements were set."""

    missing: list[str]
    unexpected: list[str]
    elements: int


def load_full_state_dict(
    module: Any, state_dict: Mapping[str, torch.Tensor], *, strict: bool = True, broadcast_from_rank0: bool = True
) -> LoadResult:
    """Sets parameters and buffers in place to whole tensors. All ranks must call it.

    Every rank takes the values of rank 0's dict. With broadcast_from_rank0=False each rank takes those of its own dict,
    which must be the same on all of them.

    >>> shardwise.cpp.load_full_state_dict(model, torch.load(path))
    """
    values = dict(state_dict)
    return LoadResult(
        *_C.load_full_state_dict(inner(module), values, strict=strict, broadcast_from_rank0=broadcast_from_rank0)
    )


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scales gradients so that their norm over all parameters and ranks is at most `max_norm`. Returns their old norm.

    The norm is a tensor, as torch's is, so the host waits for a device only when the program reads the number.
    `parameters` is a C++ module, a Python module with C++ modules inside, or its parameters(), which may include
    DTensors. All ranks must call it.

    >>> shardwise.cpp.clip_grad_norm_(model, 1.0)
    """
    given = inner(parameters) if is_cpp(parameters) else parameters
    tensors: Iterable[torch.Tensor] = given.parameters() if hasattr(given, "parameters") else given
    plain: list[torch.Tensor] = []
    placed: list[torch.Tensor] = []
    for tensor in tensors:
        (placed if hasattr(tensor, "placements") else plain).append(tensor)

    def clip(limit: float, raises: bool) -> torch.Tensor:
        return _C.clip_grad_norm_(plain, limit, norm_type=float(norm_type), error_if_nonfinite=raises)

    if not placed:
        return clip(float(max_norm), error_if_nonfinite)
    ours = clip(math.inf, raises=False)
    theirs = _norm_of(placed, norm_type)
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([ours, theirs.to(ours, non_blocking=ours.device.type != "cpu")]), norm_type
    )
    if error_if_nonfinite and not total.isfinite():
        raise _C.Error(
            f"shardwise: the total norm of order {norm_type} of the gradients is {total} and cannot be clipped; no "
            "gradient was changed. Skip this step on all ranks, or call with error_if_nonfinite=False."
        )
    for some in (plain, placed):
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, total)
    return total


def _norm_of(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
    return cast(torch.Tensor, norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


__all__ = [
    "LoadResult",
    "Mesh",
    "Pipeline",
    "PipelineOptions",
    "PipelineResult",
    "as_module",
    "clip_grad_norm_",
    "colwise",
    "full_state_dict",
    "load_full_state_dict",
    "parallelize",
    "rowwise",
    "sequence",
    "vocabulary",
]
