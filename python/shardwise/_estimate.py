"""estimate_memory() and estimate_time(): what training will take on a rank, by formula."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise import _C
from shardwise._arguments import engine_options
from shardwise._C import Link, MemoryEstimate, TimeEstimate
from shardwise._placement import Placement, chosen_dim
from shardwise._precision import own_dtype

__all__ = ["Link", "MemoryEstimate", "TimeEstimate", "estimate_memory", "estimate_time"]


def estimate_memory(
    module: nn.Module,
    world: int,
    *,
    policy: Literal["fully_shard", "replicate"] = "fully_shard",
    units: Sequence[nn.Module] = (),
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placement | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    copies: int = 1,
    rank: int = 0,
    optimizer_factor: float = 2.0,
    reduce_scatter_max_input_buffers: int = 1,
    keep_unsharded_storage: bool = False,
    device: torch.device | str | None = None,
) -> MemoryEstimate:
    """Estimates the memory that a module, wrapped and trained, will need on one of `world` ranks.

    This is a formula: it allocates nothing and needs no process group, and the module may be on the meta device. It
    counts the bytes of tensors after a few steps, but no activations, temporary memory of operations, or memory that
    process groups allocate themselves. It assumes that each unit runs once in a forward, in the order in which modules
    are registered, that every trained parameter gets a gradient, and that gradients are set to None before the next
    forward.

    Args:
        module: the module, before any part of it is wrapped.
        world: the number of ranks.
        policy: the function that will wrap it.
        units: modules inside it that will be wrapped first, in this order, with the same options.
        reshard_after_forward: as fully_shard() takes it.
        shard_placement_fn: as fully_shard() takes it.
        mp_policy: the dtypes to compute and to sum in.
        ignored_params: parameters that are left alone.
        copies: how many ranks have copies of each shard: the size of the first axis of a mesh of two.
        rank: the rank to estimate for, among those with different shards. The first ones have most.
        optimizer_factor: bytes of optimizer state for each byte of a parameter: 2 for Adam, 1 for momentum.
        reduce_scatter_max_input_buffers: the argument that set_reduce_scatter_max_input_buffers() will get.
        keep_unsharded_storage: the argument that set_keep_unsharded_storage() will get.
        device: the kind of device to train on: CPUs and GPUs run sums at different times. Default: a GPU if there is
            one.

    >>> with torch.device("meta"):
    ...     model = Transformer()
    >>> print(shardwise.estimate_memory(model, 64, units=model.layers))
    """
    return _C.estimate_memory(*_outlined(locals()))


def estimate_time(
    module: nn.Module,
    world: int,
    *,
    link: Link,
    compute: float,
    between: Link | None = None,
    ranks_per_host: int = 0,
    **how: Any,
) -> TimeEstimate:
    """Estimates how long a step of a module will take, wrapped, on one of `world` ranks.

    It plays steps through as the engine orders them. Besides what estimate_memory() assumes, the time to compute goes
    to parameters of two dimensions or more, in proportion to their elements: a third in forward, the rest in
    backward. Those that only embeddings have take none. Collectives go one after the other, while ranks compute. Each
    takes its link's latency, and as long as the bytes take that a rank, or all ranks of a host, get in it; the slowest
    link decides.

    Args:
        module: the module, before any part of it is wrapped.
        world: the number of ranks.
        link: what carries data between the ranks of a host; each rank has its own.
        compute: the seconds that a step of forward and backward takes without other ranks.
        between: what carries data between hosts; the ranks of a host share it.
        ranks_per_host: 0 if all ranks are on one host.
        how: how it will be wrapped: the other arguments of estimate_memory().

    >>> inside, between = shardwise.Link(450e9, latency=10e-6), shardwise.Link(50e9, latency=20e-6)
    >>> print(shardwise.estimate_time(model, 64, link=inside, between=between, ranks_per_host=8, compute=0.3))
    """
    given = inspect.signature(estimate_memory).bind(module, world, **how)
    given.apply_defaults()
    outline, policy = _outlined(given.arguments)
    return _C.estimate_time(
        outline, policy, inside=link, between=between, ranks_per_host=ranks_per_host, compute=compute
    )


def _outlined(given: Mapping[str, Any]) -> tuple[_C.Outline, _C.Policy]:
    """What an estimate needs, of the arguments of estimate_memory()."""
    module, placement = given["module"], given["shard_placement_fn"]
    replicates = given["policy"] == "replicate"
    if not replicates and given["policy"] != "fully_shard":
        raise ValueError(
            f"shardwise: an estimate knows the policies 'fully_shard' and 'replicate', not '{given['policy']}'."
        )
    outline = _C.Outline(sum(buffer.nbytes for buffer in module.buffers()))
    walk = _Walk(module, [*given["units"], module], given["ignored_params"] or set(), outline)
    precision = given["mp_policy"] or MixedPrecisionPolicy()
    computing = (each for each in module.modules() if not isinstance(each, nn.Embedding | nn.EmbeddingBag))
    computed = {own for each in computing for own in each.parameters(recurse=False)}
    for name, parameter in walk.parameters:
        outline.add_parameter(
            sizes=list(parameter.size()),
            dtype=parameter.dtype,
            dim=chosen_dim(placement, parameter, name, "an estimate") or 0,
            whole=replicates and not _is_cast(name, parameter, precision),
            full_dtype=own_dtype(precision, parameter, name),
            trained=parameter.requires_grad,
            looked_up=parameter not in computed,
        )
    for own, outer in walk.units():
        has_full_copies = not replicates or any(_is_cast(*walk.parameters[index], precision) for index in own)
        outline.add_unit(parameters=own, outer=outer, has_full_copies=has_full_copies)
    policy = _C.Policy(
        engine_options(precision, reshard_after_forward=False if replicates else given["reshard_after_forward"]),
        given["world"],
        replicates=replicates,
        copies=given["copies"],
        rank=given["rank"],
        optimizer_factor=given["optimizer_factor"],
        reduce_scatter_max_input_buffers=given["reduce_scatter_max_input_buffers"],
        keep_unsharded_storage=given["keep_unsharded_storage"],
        device=None if given["device"] is None else torch.device(given["device"]),
    )
    return outline, policy


def _is_cast(name: str, parameter: nn.Parameter, precision: MixedPrecisionPolicy) -> bool:
    dtype = own_dtype(precision, parameter, name) or precision.param_dtype
    return dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype


class _Walk:
    """The units with their parameters; tells the outline in which order a forward uses them, that of registration."""

    def __init__(
        self, module: nn.Module, modules: Sequence[nn.Module], ignored: set[nn.Parameter], outline: _C.Outline
    ) -> None:
        inside = set(module.modules())
        for unit in modules[:-1]:
            if unit is module or unit not in inside:
                raise ValueError(
                    f"shardwise: estimate: a module in units does not lie below this {type(module).__name__}. "
                    "List only modules below it; it is the outermost unit itself."
                )
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self._numbers: dict[nn.Parameter, int] = {}
        self._modules = list(modules)
        self._own: list[list[int]] = []
        for unit in modules:
            first = len(self.parameters)
            for name, parameter in unit.named_parameters():
                if _C.has_unit(parameter):
                    raise ValueError(
                        f"shardwise: estimate: the parameter '{name}' belongs to a unit already. Estimate before "
                        "fully_shard() or replicate(), or use plan()."
                    )
                if parameter not in self._numbers and parameter not in ignored:
                    self._numbers[parameter] = len(self.parameters)
                    self.parameters.append((name, parameter))
            self._own.append(list(range(first, len(self.parameters))))
        self._outer: dict[int, int | None] = {}
        self._walk(module, outline)

    def units(self) -> list[tuple[list[int], int | None]]:
        """The numbers of each unit's own parameters, and that of the unit around it."""
        return [(own, self._outer[number]) for number, own in enumerate(self._own)]

    def _walk(self, module: nn.Module, outline: _C.Outline) -> None:
        places = {id(unit): number for number, unit in enumerate(self._modules)}
        used: set[int] = set()

        def visit(each: nn.Module, outer: int | None) -> None:
            unit = places.get(id(each))
            if unit is not None:
                self._outer.setdefault(unit, outer)
                outline.begin(unit)
            for parameter in each.parameters(recurse=False):
                number = self._numbers.get(parameter)
                if number is not None and number not in used:
                    used.add(number)
                    outline.use(number)
            for child in each.children():
                visit(child, outer if unit is None else unit)
            if unit is not None:
                outline.end(unit)

        visit(module, None)
