"""Whole, writable parameters for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise._cpp_modules import is_cpp


@contextmanager
def with_whole_parameters(module: nn.Module, *, broadcast_from_rank0: bool = True) -> Iterator[None]:
    """Gives the module and those in it whole parameters, to initialize, quantize or clip them, or to change rows.

    Afterwards all ranks have the values of the first rank of each mesh. With `broadcast_from_rank0=False` they must set
    the same values themselves. Buffers and plain parameters stay as they are. If the block raises, parameters stay as
    they were. All ranks enter it together, outside of a forward and a backward. The module cannot run meanwhile.

    >>> with shardwise.with_whole_parameters(model), torch.no_grad():
    ...     model.head.weight /= model.head.weight.norm()
    """
    whole: dict[DTensor, nn.Parameter] = {}
    shown: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        if is_cpp(part):
            raise TypeError(
                f"shardwise: with_whole_parameters(): {type(part).__name__} is written in C++. Use the function of the "
                "same name there."
            )
        registered: dict[str, Any] = part._parameters
        shown += [(part, name, each) for name, each in registered.items() if isinstance(each, DTensor)]
    for _, _, parameter in shown:
        if parameter not in whole:
            values = parameter.detach().full_tensor()
            if all(placement.is_replicate() for placement in parameter.placements):
                values = values.clone()
            whole[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    try:
        for part, name, parameter in shown:
            part._parameters[name] = whole[parameter]
        yield
        changed = {parameter: part._parameters[name] for part, name, parameter in shown}
    finally:
        for part, name, parameter in shown:
            part._parameters[name] = parameter
    source = 0 if broadcast_from_rank0 else None
    with torch.no_grad():
        for parameter, values in changed.items():
            assert values is not None
            parameter.copy_(
                distribute_tensor(values.detach(), parameter.device_mesh, parameter.placements, src_data_rank=source)
            )
