"""FSDPModule and ReplicateModule: what wrapping adds to the classes of modules."""

from __future__ import annotations

import functools
from contextlib import suppress
from types import MethodType
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info

from shardwise import _C, _torch_api
from shardwise._gradient_methods import GradientMethods
from shardwise._state import cpp_units_of, states_of, units_of, wrapped_state


class UnshardHandle(torch.distributed.fsdp.UnshardHandle):
    """What unshard(async_op=True) returns: wait() returns once the full parameters are there.

    >>> handle = model.layers[0].unshard(async_op=True)
    >>> handle.wait()
    """

    def __init__(self, unsharding: _C.Unsharding) -> None:
        self._unsharding: _C.Unsharding | None = unsharding

    def wait(self) -> None:
        """Returns once the module has its full parameters. The second call does nothing.

        >>> model.unshard(async_op=True).wait()
        """
        if self._unsharding is not None:
            self._unsharding.wait()
            self._unsharding = None


class FSDPModule(GradientMethods, _torch_api.FSDPModule):
    """What fully_shard() adds to the class of a module. Methods with `recurse` also apply to modules inside.

    >>> wrapped = [module for module in model.modules() if isinstance(module, shardwise.FSDPModule)]
    """

    _orig_cls_mro_index = 4

    def reshard(self) -> None:
        """Frees the full parameters of this module's unit; the module has its sharded ones again.

        >>> model.reshard()
        """
        wrapped_state(self).unit.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the full parameters of this module's unit; with `async_op`, wait() on the handle completes it.

        >>> handle = model.layers[0].unshard(async_op=True)
        >>> handle.wait()
        """
        state = wrapped_state(self)
        state.refresh_parameters()
        state.check_values()
        handle = UnshardHandle(state.unit.unshard())
        if async_op:
            return handle
        handle.wait()
        return None

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after the module's forward.

        >>> model.set_reshard_after_forward(False)
        """
        check_is_bool(reshard_after_forward)
        for state in states_of(self, recurse):
            state._auto_reshard_after_forward = False
            for group in state.groups:
                assert isinstance(group.mesh_info, FSDPMeshInfo), (
                    "shardwise: reshard_after_forward is for fully_shard(): a replicated module keeps its parameters."
                )
                group.post_forward_mesh_info = _get_post_forward_mesh_info(reshard_after_forward, group.mesh_info)
            state.unit.set_reshard_after_forward(reshard_after_forward)
        for unit in cpp_units_of(self, recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether full parameters are freed after a backward.

        >>> model.set_reshard_after_backward(False)
        """
        for unit in units_of(self, recurse):
            unit.set_reshard_after_backward(reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[_torch_api.FSDPModule]) -> None:
        """The modules whose all-gathers should start when this one begins its forward.

        >>> first.set_modules_to_forward_prefetch([second])
        """
        wrapped_state(self).unit.set_forward_prefetch(_all_units(modules))

    def set_modules_to_backward_prefetch(self, modules: list[_torch_api.FSDPModule]) -> None:
        """The modules whose all-gathers should start when this one begins its backward.

        >>> second.set_modules_to_backward_prefetch([first])
        """
        wrapped_state(self).unit.set_backward_prefetch(_all_units(modules))

    def set_custom_all_gather(self, comm: Any) -> None:
        """Makes `comm(output_tensor=, input_tensor=, group=, async_op=)` carry out this module's all-gathers.

        >>> model.set_custom_all_gather(MyAllGather())
        """
        state = wrapped_state(self)
        for group in state.groups:
            group.custom_all_gather = comm
        state.unit.set_custom_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Makes `comm` carry out this module's reduce-scatters; it is called as for all-gathers, plus `op`.

        >>> model.set_custom_reduce_scatter(MyReduceScatter())
        """
        state = wrapped_state(self)
        for group in state.groups:
            group.custom_reduce_scatter = comm
        state.unit.set_custom_reduce_scatter(comm)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the device wait for `event` before the next forward gathers: for an optimizer on a stream of its own.

        >>> model.set_post_optim_event(torch.cuda.current_stream().record_event())
        """
        wrapped_state(self).unit.set_post_optim_event(event)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this module's backward needs its full parameters; an embedding's does not.

        >>> model.embedding.set_unshard_in_backward(False)
        """
        wrapped_state(self).unit.set_unshard_in_backward(unshard_in_backward)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether collectives use memory that their process groups provide, as NCCL's may; no effect where none does.

        >>> model.set_allocate_memory_from_process_group_for_comm(True)
        """
        group = wrapped_state(self).groups[-1]
        for what, comm in (("all gather", group.custom_all_gather), ("reduce scatter", group.custom_reduce_scatter)):
            assert comm is None, (
                "shardwise: set_allocate_memory_from_process_group_for_comm cannot be used when "
                f"{what} comm is custom: {type(comm).__name__}. Allocate in its allocate()."
            )
        with suppress(_C.Error):  # there is no such memory
            wrapped_state(self).unit.set_memory_from_process_group(enable)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether full parameters, when they are freed, keep their memory for the next time: addresses then stay.

        >>> model.set_keep_unsharded_storage(True)
        """
        for unit in units_of(self, recurse):
            unit.set_keep_unsharded_storage(keep)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Whether all-gathers go through NCCL's symmetric memory. Not supported.

        >>> model.set_symm_mem_for_comm()  # raises NotImplementedError
        """
        raise NotImplementedError(
            "shardwise: set_symm_mem_for_comm() is not supported: the engine gathers through memory of its own, which "
            "is not registered with NCCL. Leave the call out."
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Does nothing: gathers never block the host here."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # share_memory() applies a function of its own, also where a module around this one is asked to.
        if getattr(args[0] if args else None, "__qualname__", "").startswith("Module.share_memory."):
            raise RuntimeError(
                f"shardwise: share_memory() cannot share the parameters of a {type(self).__name__}: they are pieces in "
                "the memory of their unit. Share a plain copy of the model that has loaded its full state dict."
            )
        self.reshard()
        # Not torch's FSDPModule._apply(), which expects torch's engine.
        result = super(_torch_api.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        wrapped_state(self).take_memory()
        return result


class ReplicateModule(FSDPModule, _torch_api.ReplicateModule):
    """What replicate() adds to the class of a module.

    >>> assert isinstance(shardwise.replicate(model), shardwise.ReplicateModule)
    """

    _orig_cls_mro_index = 6


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a wrapped module count as its forward. Does nothing for a module that is not wrapped.

    >>> shardwise.register_fsdp_forward_method(model, "generate")
    """
    if not isinstance(module, FSDPModule):
        _torch_api.register_fsdp_forward_method(module, method_name)
        return
    if not hasattr(module, method_name):
        raise ValueError(f"shardwise: {type(module)} does not have a method {method_name}.")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def with_hooks(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapped_state(self).run(self, method, args, kwargs)

    setattr(module, method_name, MethodType(with_hooks, module))


def share_comm_ctx(modules: list[_torch_api.FSDPModule]) -> None:
    """Makes several roots that run one after the other share one memory pool and the same streams.

    >>> shardwise.share_comm_ctx([first_stage, second_stage])
    """
    torchs = [each for each in modules if isinstance(each, _torch_api.FSDPModule) and not isinstance(each, FSDPModule)]
    if len(torchs) == len(modules):
        _torch_api.share_comm_ctx(modules)
        return
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"shardwise: Expects list of FSDPModules but got {module}.")
    states = [wrapped_state(module) for module in modules]
    _C.share_comm_context([state.unit for state in states])
    for state in states:
        state._comm_ctx = states[0]._comm_ctx


_classes: dict[tuple[type, type], type] = {}


def add_class(module: nn.Module, added: type, prefix: str) -> None:
    """Gives the module a class named `prefix` + its name, derived from `added` and the old class."""
    original = type(module)
    made = _classes.get((original, added))
    if made is None:
        made = type(f"{prefix}{original.__name__}", (added, original), {"__deepcopy__": _refuse_deepcopy})
        _classes[original, added] = made
    module.__class__ = made


def _refuse_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError(
        "shardwise: FSDP does not support deepcopy. Please use state dict for serialization. "
        "Or copy the module before it is wrapped."
    )


def check_is_bool(reshard_after_forward: object) -> None:
    """Raises ValueError if set_reshard_after_forward() does not take this value."""
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"shardwise: reshard_after_forward should be a bool, got {type(reshard_after_forward)}. "
            "A number of ranks can only be given to fully_shard()."
        )


def _all_units(modules: list[_torch_api.FSDPModule]) -> list[_C.Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"shardwise: Expects FSDPModule but got {type(module)}: {module}.")
    return [wrapped_state(module).unit for module in modules]
