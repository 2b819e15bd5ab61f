"""fully_shard() and replicate() for C++ modules, and what they add to the nn.Module around such a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable_state import _insert_module_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
from torch.nn.cpp import ModuleWrapper
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise import _C
from shardwise._arguments import Arguments, check_kinds
from shardwise._cpp_modules import inner, is_cpp
from shardwise._meshes import default_mesh, device_of, engine_mesh
from shardwise._module_classes import FSDPModule, ReplicateModule, add_class, check_is_bool
from shardwise._placement import chosen_dim
from shardwise._state import ParamGroup, State, state_of, units_of
from shardwise._torch_versions import set_param_groups

#: What a parameter with a mesh of its own is given to in vain.
_PARAMETERS = "a C++ module in Python (in C++: FullyShardOptions().parameter_mesh())"


class CppState(State):
    """The state of an nn.Module around a C++ module. The unit itself belongs to the C++ front end."""

    def begin(self, module: ModuleWrapper, unit: _C.Unit) -> None:
        """From now on this is the state of this module."""
        _insert_module_state(module, self)
        module.__dict__["_shardwise_state"] = self  # torch's table keeps nothing alive
        self._cpp_module = module.cpp_module
        self.unit = cast(Any, unit)
        self._modules = (module,)
        self._kind = "Replicate" if unit.kind == "replicate" else "FSDP"
        self.groups = (ParamGroup(self.unit, (module,), cast(Any, None), None, None),)
        set_param_groups(self, self.groups)

    def refresh_parameters(self) -> None:
        """The C++ front end does that itself."""

    def check_values(self) -> None:
        """The C++ front end does that itself."""

    def run(self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the method as shardwise::call() does: the C++ module's hooks see the tensors that go in and come
        out."""
        call = _C.Call(self._cpp_module)
        try:
            args, kwargs = _replaced(call.begin, (args, kwargs))
            return _replaced(call.end, method(*args, **kwargs))
        except BaseException:
            call.fail()
            raise


def _replaced(hooks: Callable[[list[torch.Tensor]], list[torch.Tensor]], value: Any) -> Any:
    leaves, structure = tree_flatten(value)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for place, tensor in zip(places, hooks([leaves[place] for place in places]), strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, structure)


class _CppMethods(FSDPModule):
    """The methods of FSDPModule that differ for a C++ module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = cast(nn.Module, self)
        return cast(CppState, state_of(module)).run(module, super().__call__, args, kwargs)  # type: ignore[misc]

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after the module's forward.

        >>> model.set_reshard_after_forward(False)
        """
        check_is_bool(reshard_after_forward)
        for unit in units_of(self, recurse):
            unit.set_reshard_after_forward(reshard_after_forward)


class CppFSDPModule(_CppMethods):
    """What fully_shard() adds to the class of the nn.Module around a C++ module."""

    _orig_cls_mro_index = 6


class CppReplicateModule(_CppMethods, ReplicateModule):
    """What replicate() adds to the class of the nn.Module around a C++ module."""

    _orig_cls_mro_index = 8


def wrap(function: str, module: Any, given: Arguments) -> Any:
    """Wraps a C++ module, or a list of them; `function` is "fully_shard" or "replicate"."""
    modules = _given(module, function)
    check_kinds(function, given, None if isinstance(given.mesh, (ProcessGroup, _C.Mesh)) else given.mesh)
    reshard = given.reshard_after_forward
    if reshard is not None and not isinstance(reshard, int):
        raise ValueError(
            "shardwise: reshard_after_forward should be a bool or an int representing the group size to reshard to, "
            f"not {reshard!r:.200}."
        )
    if given.dp_mesh_dims is not None:
        raise ValueError(
            "shardwise: dp_mesh_dims is for parameters that are DTensors, which C++ modules have not. Pass a mesh of "
            "the axes for data parallelism alone."
        )
    replicates = function == "replicate"
    outermost, mesh = _outermost(modules), cpp_mesh(given.mesh, replicates)
    options, ignored = given.options(), list(given.ignored)
    if replicates:
        unit = _C.replicate(outermost, mesh, options, ignored=ignored)
    else:
        choose = given.shard_placement_fn
        placement = None if choose is None else lambda name, parameter: chosen_dim(choose, parameter, name, _PARAMETERS)
        unit = _C.fully_shard(outermost, mesh, options, placement=placement, ignored=ignored)
    _give_methods(modules, unit)
    return module


def as_module(module: Any) -> nn.Module:
    """An nn.Module around a C++ module; it has the methods of FSDPModule if the module was wrapped."""
    around = ModuleWrapper(module)
    unit = _C.cpp_unit(module)
    if unit is not None:
        _give_methods([around], unit)
    return around


def _given(module: Any, function: str) -> list[Any]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in modules:
        if not is_cpp(each):
            raise TypeError(
                f"shardwise: {function}() got a list with C++ modules and {each!r:.200}. C++ modules and Python "
                "modules cannot form one unit: call it once for each kind."
            )
    return modules


def _outermost(modules: Sequence[Any]) -> list[Any]:
    """The C++ modules, without those that lie inside others of them."""
    given = [inner(module) for module in modules]
    below = [{id(each) for each in module.modules()} - {id(module)} for module in given]
    return [module for module in given if not any(id(module) in others for others in below)]


def _give_methods(modules: Iterable[Any], unit: _C.Unit) -> None:
    added = CppReplicateModule if unit.kind == "replicate" else CppFSDPModule
    for module in modules:
        if isinstance(module, ModuleWrapper) and not isinstance(module, FSDPModule):
            CppState().begin(module, unit)
            add_class(module, added, "Replicate" if added is CppReplicateModule else "FSDP")


def cpp_mesh(
    mesh: DeviceMesh | ProcessGroup | _C.Mesh | None, replicates: bool = False, name: str | None = None
) -> _C.Mesh:
    """The engine's mesh for what a program gives as one; `name` is that of the axis of a process group."""
    if isinstance(mesh, _C.Mesh):
        return mesh
    if isinstance(mesh, ProcessGroup):
        name = name or ("replicate" if replicates else "shard")
        return _C.Mesh.from_process_groups([name], [mesh], device_of(mesh))
    mesh = mesh or default_mesh(replicates)
    return engine_mesh(mesh, replicates, _get_device_from_mesh(mesh))
