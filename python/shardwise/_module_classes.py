"""FSDPModule and ReplicateModule: what wrapping adds to the classes of modules."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import Any, Literal, NoReturn, overload

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info

from shardwise import _C, _torch_api
from shardwise._state import State, cpp_units_of, states_of, units_of, wrapped_state
from shardwise._torch_versions import TorchsGradientReductionHandle


class UnshardHandle(torch.distributed.fsdp.UnshardHandle):
    """What unshard(async_op=True) returns: wait() returns once the full parameters are there.

    >>> handle = model.layers[0].unshard(async_op=True)
    >>> handle.wait()
    """

    def __init__(self, unsharding: _C.UnshardHandle) -> None:
        self._unsharding: _C.UnshardHandle | None = unsharding

    def wait(self) -> None:
        """Returns once the module has its full parameters. The second call does nothing.

        >>> model.unshard(async_op=True).wait()
        """
        if self._unsharding is not None:
            self._unsharding.wait()
            self._unsharding = None


class GradientReductionHandle(TorchsGradientReductionHandle):
    """What finalize_backward(async_op=True) returns: wait() returns once the gradients are in place.

    >>> handle = model.finalize_backward(async_op=True)
    >>> handle.wait()
    """

    def __init__(self, reduction: _C.GradientReductionHandle | None) -> None:
        self._reduction = reduction

    def wait(self) -> None:
        """Returns once the gradients are in place. The second call does nothing.

        >>> model.finalize_backward(async_op=True).wait()
        """
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None


class FSDPModule(_torch_api.FSDPModule):
    """What fully_shard() adds to the class of a module. Methods with `recurse` also apply to modules inside.

    >>> wrapped = [module for module in model.modules() if isinstance(module, shardwise.FSDPModule)]
    """

    _orig_cls_mro_index = 3

    def reshard(self) -> None:
        """Frees the full parameters of this module's unit. The module has its shards again.

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

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility with torch, without effect: gradients are complete when a backward returns.

        >>> model.set_is_last_backward(False)
        """
        wrapped_state(self)._state_ctx.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether the program itself ends a backward, with finalize_backward() after one backward or several.

        Call it on the root, but not between a backward and its finalization.

        >>> model.set_manual_backward_finalization(True)
        """
        _check_root(state := wrapped_state(self), "set_manual_backward_finalization")
        state.unit.set_manual_backward_finalization(enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...
    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...
    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Sums gradients that are not summed yet, and frees full parameters; with `async_op`, wait() completes it.

        For backwards after set_manual_backward_finalization(True). Does nothing before the first forward.

        >>> model.set_manual_backward_finalization(True)
        >>> model.set_requires_gradient_sync(False)
        >>> for half in (first_half, second_half):
        ...     loss_of(half).backward()
        >>> model.set_requires_gradient_sync(True)
        >>> model.finalize_backward()
        """
        state = wrapped_state(self)
        # C++ modules have no first forward that Python sees.
        if state._is_root is None and isinstance(state.unit, _C.ModuleUnit):
            return GradientReductionHandle(None) if async_op else None
        _check_root(state, "finalize_backward")
        handle = GradientReductionHandle(state.unit.finalize_backward())
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Forgets a forward or backward that raised, so that the next forward starts afresh.

        It frees full parameters and drops gradients that are not in `.grad` yet: those of the failed backward, and of
        earlier ones without synchronisation. Call it on the root, on all ranks.

        >>> try:
        ...     loss_of(batch).backward()
        ... except RuntimeError:
        ...     model.reset_iter_state()
        """
        _check_root(state := wrapped_state(self), "reset_iter_state")
        state.unit.reset_iter_state()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward averages gradients over the ranks.

        While it is off, each rank accumulates its own gradients outside of `.grad`. The next backward with it on
        averages them all.

        >>> model.set_requires_gradient_sync(False)
        >>> loss_of(first_half).backward()
        >>> model.set_requires_gradient_sync(True)
        >>> loss_of(second_half).backward()
        """
        for unit in units_of(self, recurse):
            unit.set_requires_gradient_sync(requires_gradient_sync)
            unit.set_requires_all_reduce(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether gradients are also averaged over the ranks with copies of the shards.

        >>> model.set_requires_all_reduce(False)
        """
        for unit in units_of(self, recurse):
            unit.set_requires_all_reduce(requires_all_reduce)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether a parameter that no rank used gets a gradient of zeros instead of none.

        A parameter that some ranks used gets the average over all of them either way.

        >>> model.set_reduce_scatter_unused_params(True)
        """
        for unit in units_of(self, recurse):
            unit.set_reduce_scatter_unused_params(reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many sums of gradients may be under way at a time, each with its own buffer. Default: one.

        The largest number set on any module counts for the whole model. A larger number helps if sums take longer than
        the backward that they run beside.

        >>> model.set_reduce_scatter_max_input_buffers(2)
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"shardwise: max_input_buffers must be an int, got {type(max_input_buffers).__name__}.")
        if max_input_buffers < 1:
            raise ValueError(f"shardwise: max_input_buffers must be a positive int, got {max_input_buffers}.")
        for unit in units_of(self, recurse):
            unit.set_reduce_scatter_max_input_buffers(max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accepted for compatibility with torch, without effect: sums always have process groups of their own.

        >>> model.set_separate_reduce_scatter_group()
        """

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Calls `hook` with the sum of this module's gradients before it reaches `.grad`. The hook may change the sum.

        >>> model.set_all_reduce_hook(lambda sum: sum.clamp_(-1, 1))
        """
        state = wrapped_state(self)
        assert hook is not None or stream is None, (
            "shardwise: all reduce hook stream is specified but hook itself is missing."
        )
        if stream is not None and any(isinstance(group.mesh_info, HSDPMeshInfo) for group in state.groups):
            raise ValueError(
                "shardwise: stream cannot be set when using native HSDP: the hook runs after the all-reduce there."
            )
        state.unit.set_all_reduce_hook(_in_stream(hook, stream))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets the divisor of the sum of this module's own gradients. Default: the number of ranks.

        >>> model.set_gradient_divide_factor(1.0)
        """
        wrapped_state(self).unit.set_gradient_divide_factor(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of set_gradient_divide_factor().

        >>> model.set_reduce_scatter_divide_factor(1.0)
        """
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Divides this module's own gradients after the sum instead of before it.

        >>> model.set_force_sum_reduction_for_comms(True)
        """
        wrapped_state(self).unit.set_force_sum_reduction(enable)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Makes `comm(output_tensor=, input_tensor=, group=, async_op=)` carry out this module's all-gathers.

        >>> model.set_custom_all_gather(MyAllGather())
        """
        state = wrapped_state(self)
        for group in state.groups:
            group.custom_all_gather = comm
        state.unit.set_custom_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Makes `comm` carry out this module's reduce-scatters. Its arguments are those for all-gathers, and `op`.

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
        """Whether a backward gathers this module's full parameters. An embedding does not need them.

        >>> model.embedding.set_unshard_in_backward(False)
        """
        wrapped_state(self).unit.set_unshard_in_backward(unshard_in_backward)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether collectives use memory of their process groups, as NCCL offers. Without effect for other groups.

        >>> model.set_allocate_memory_from_process_group_for_comm(True)
        """
        _refuse_custom(self, "set_allocate_memory_from_process_group_for_comm", "Allocate in its allocate().")
        with suppress(_C.Error):  # there is no such memory
            wrapped_state(self).unit.set_memory_from_process_group(enable)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether freed full parameters keep their memory, and so have the same addresses the next time.

        >>> model.set_keep_unsharded_storage(True)
        """
        for unit in units_of(self, recurse):
            unit.set_keep_unsharded_storage(keep)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Has no effect but a warning: collectives of this engine do not use symmetric memory. Results are the same.

        >>> model.set_symm_mem_for_comm()  # warns, the first time
        """
        _refuse_custom(self, "set_symm_mem_for_comm", "Leave this call out.")
        _warn_of_symmetric_memory()

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


def _refuse_custom(module: FSDPModule, method: str, remedy: str) -> None:
    group = wrapped_state(module).groups[-1]
    for what, comm in (("all gather", group.custom_all_gather), ("reduce scatter", group.custom_reduce_scatter)):
        assert comm is None, (
            f"shardwise: {method} cannot be used when {what} comm is custom: {type(comm).__name__}. {remedy}"
        )


@functools.cache
def _warn_of_symmetric_memory() -> None:
    warnings.warn(
        "shardwise: set_symm_mem_for_comm() has no effect: the engine gathers and sums through memory of its own, "
        "which is not symmetric. Results are the same; leave the call out to be rid of this warning.",
        stacklevel=3,
    )


class ReplicateModule(FSDPModule, _torch_api.ReplicateModule):
    """What replicate() adds to the class of a module.

    >>> assert isinstance(shardwise.replicate(model), shardwise.ReplicateModule)
    """

    _orig_cls_mro_index = 5


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


def _check_root(state: State, method: str) -> None:
    if state._is_root is False:
        raise RuntimeError(f"shardwise: {method} must be called on the root {state._kind} module.")


def _in_stream(hook: Callable[[torch.Tensor], None] | None, stream: torch.Stream | None) -> Callable[..., None] | None:
    if hook is None or stream is None:
        return hook

    def in_stream(reduce_output: torch.Tensor) -> None:
        current = torch.accelerator.current_stream(stream.device)
        stream.wait_stream(current)
        with stream:
            hook(reduce_output)
        current.wait_stream(stream)

    return in_stream
