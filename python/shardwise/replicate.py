"""replicate(): every rank holds the whole module, and backward averages the gradients over the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn

from shardwise import _C

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)

_STATE = "_shardwise"


@dataclass(frozen=True)
class _State:
    """What a replicated module carries: its unit, and the names of the parameters that this and inner units have."""

    unit: _C.Unit
    names: tuple[str, ...]


class Plan:
    """What a replicated module does in a step. str() is a table; `units` is the same as data."""

    def __init__(self, unit: _C.Unit) -> None:
        self._table = unit.plan_table()
        data = json.loads(unit.plan_json())
        self.mesh: str = data["mesh"]
        self.units: list[dict[str, Any]] = data["units"]

    def __str__(self) -> str:
        return self._table


class ReplicateModule:
    """What replicate() adds to the class of a module."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward averages gradients over the ranks.

        While it is off, gradients are summed up out of sight; the next backward with it on averages the sum.
        It is read once a backward, at its end. `recurse` includes the replicated modules inside this one.

        >>> model.set_requires_gradient_sync(False)
        >>> loss_of(first_half).backward()
        >>> model.set_requires_gradient_sync(True)
        >>> loss_of(second_half).backward()
        """
        _state_of(self).unit.set_requires_gradient_sync(requires_gradient_sync, recurse)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        _check_watched(self)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError(
            f"shardwise: {type(self).__name__} cannot be deep-copied: the copy's gradients would not be averaged. "
            "Copy the module before replicate(), or load its state dict into another one."
        )


@overload
def replicate(module: M, *, mesh: DeviceMesh | None = ..., ignored_params: set[nn.Parameter] | None = ...) -> M: ...
@overload
def replicate(
    module: list[M], *, mesh: DeviceMesh | None = ..., ignored_params: set[nn.Parameter] | None = ...
) -> list[M]: ...
def replicate(
    module: M | list[M],
    *,
    mesh: DeviceMesh | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> M | list[M]:
    """Averages the gradients of a module, or of a list of modules taken as one, over the ranks after each backward.

    Call it on inner modules first (each becomes a unit with a collective of its own) and on the outermost last.
    Returns what it was given; the class of each module becomes Replicate<its name>, which has the methods of
    `ReplicateModule`. Every rank must wrap the same modules in the same order. Values are not broadcast: start from
    the same seed or checkpoint.

    Args:
        module: the module, or modules that form one unit.
        mesh: a one-dimensional DeviceMesh. Default: all ranks (the default process group, which is made from
            torchrun's environment where there is none).
        ignored_params: parameters that are left alone.

    A parameter that no rank used gets no gradient; one that some ranks used gets the mean, the others counting zero.

    >>> for block in model.blocks:
    ...     shardwise.replicate(block)
    >>> shardwise.replicate(model)
    """
    modules: list[M] = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in modules:
        _check_module(each)
    engine_mesh = _engine_mesh(mesh)
    _move(modules, engine_mesh.device)
    ignored = {id(parameter) for parameter in ignored_params or ()}
    unit = _C.replicate(engine_mesh, [entry for entry in _parameters(modules) if id(entry[1]) not in ignored])
    for each in modules:
        names = tuple(name for name, parameter in each.named_parameters() if id(parameter) not in ignored)
        each.__dict__[_STATE] = _State(unit, names)
        each.__class__ = _replicate_class(type(each))
        each.register_load_state_dict_post_hook(_after_load)
    return module


def plan(module: nn.Module) -> Plan:
    """The plan of a module that replicate() was called on.

    >>> print(shardwise.plan(model))
    """
    return Plan(_state_of(module).unit)


def _state_of(module: object) -> _State:
    state = module.__dict__.get(_STATE)
    if not isinstance(state, _State):
        raise ValueError(f"shardwise: replicate() was not called on this {type(module).__name__}.")
    return state


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"shardwise: replicate expects an nn.Module or a list of them, and got {type(module).__name__}."
        )
    name = type(module).__name__
    if isinstance(module, ReplicateModule):
        raise AssertionError(
            f"shardwise: replicate() was called on this {name} already. "
            "Each distinct composable distributed API can only be applied to a module once."
        )
    for container in (nn.ModuleList, nn.ModuleDict):
        if isinstance(module, container) and type(module).forward is container.forward:
            raise ValueError(
                f"shardwise: replicate does not support containers that do not implement forward, and got a {name}. "
                "Wrap the modules in it one by one, or give a list of them."
            )


def _engine_mesh(mesh: DeviceMesh | None) -> _C.Mesh:
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        group = dist.group.WORLD
        assert group is not None
        has_cuda = torch.cuda.is_available() and any(device.type == "cuda" for device in group._device_types)
        return _C.Mesh.from_process_groups(["replicate"], [group], _device("cuda" if has_cuda else "cpu"))
    if mesh.ndim != 1:
        raise ValueError(
            f"shardwise: replicate expects a 1D DeviceMesh but got {mesh}. Take the axis that holds the copies: "
            "mesh['name']."
        )
    names = mesh.mesh_dim_names or ("replicate",)
    return _C.Mesh.from_process_groups(list(names), [mesh.get_group()], _device(mesh.device_type))


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _move(modules: Iterable[nn.Module], device: torch.device) -> None:
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device != device and not tensor.is_meta:
                tensor.data = tensor.to(device)


def _parameters(modules: list[M]) -> list[tuple[list[str], nn.Parameter]]:
    """Each parameter once, with all its names. In a list of modules a name begins with the module's place in it."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for place, module in enumerate(modules):
        prefix = f"{place}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), ([], parameter))[0].append(prefix + name)
    return list(found.values())


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _replicate_class(original: type[M]) -> type[M]:
    if original not in _classes:
        _classes[original] = type(f"Replicate{original.__name__}", (ReplicateModule, original), {})
    return _classes[original]  # type: ignore[return-value]


def _after_load(module: nn.Module, incompatible_keys: object) -> None:
    _check_watched(module)


def _check_watched(module: object) -> None:
    assert isinstance(module, nn.Module)
    parameters = dict(module.named_parameters())
    lost = [name for name in _state_of(module).names if not _C.is_watched(parameters.get(name))]
    if lost:
        raise RuntimeError(
            f"shardwise: the parameters {lost} of {type(module).__name__} were replaced by other tensors; their "
            "gradients would stay on this rank alone. Change parameters in place, or replace them (assign=True, "
            "swap_tensors) before replicate()."
        )
