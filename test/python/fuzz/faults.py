"""Ways for an engine to be wrong that a comparison must notice, also where it bears with other roundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist


def divide_by_more(module: Any) -> None:
    """Each gradient is a fifth too small."""
    module.set_gradient_divide_factor(1.25 * dist.get_world_size())


class OwnPart:
    """A reduce-scatter that forgets the other ranks."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def leave_out_the_sum(module: Any) -> None:
    """Of sharded units."""
    if hasattr(type(module), "set_custom_reduce_scatter"):
        module.set_custom_reduce_scatter(OwnPart())


def lose_microbatches(module: Any) -> None:
    """The last one's gradients take the place of the earlier ones'."""

    shards = list(module.parameters())

    def set_requires_gradient_sync(flag: bool, recurse: bool = True) -> None:
        for parameter in shards:
            if flag and recurse:
                parameter.grad = None

    module.set_requires_gradient_sync = set_requires_gradient_sync


FAULTS: tuple[Callable[[Any], None], ...] = (divide_by_more, leave_out_the_sum, lose_microbatches)


def broken(engine: Any, fault: Callable[[Any], None]) -> Any:
    """The same engine with the fault in all modules that it wraps."""

    def breaking(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(modules: Any, **options: Any) -> Any:
            wrapped = function(modules, **options)
            fault(wrapped[0] if isinstance(wrapped, list) else wrapped)
            return wrapped

        return wrap

    return replace(engine, fully_shard=breaking(engine.fully_shard), replicate=breaking(engine.replicate))
