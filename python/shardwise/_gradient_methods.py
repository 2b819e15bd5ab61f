"""What a wrapped module's methods set about its gradients, and about the backwards that bring them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from shardwise import _C
from shardwise._state import State, units_of, wrapped_state
from shardwise._torch_versions import TorchsGradientReductionHandle


class GradientReductionHandle(TorchsGradientReductionHandle):
    """What finalize_backward(async_op=True) returns: wait() returns once the gradients are in place.

    >>> handle = model.finalize_backward(async_op=True)
    >>> handle.wait()
    """

    def __init__(self, reduction: _C.GradientReduction | None) -> None:
        self._reduction = reduction

    def wait(self) -> None:
        """Returns once the gradients are in place. The second call does nothing.

        >>> model.finalize_backward(async_op=True).wait()
        """
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None


class GradientMethods:
    """The part of FSDPModule that is about gradients. Methods with `recurse` also apply to modules inside."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility with torch, without effect: gradients are complete when a backward returns.

        >>> model.set_is_last_backward(False)
        """
        wrapped_state(self)._state_ctx.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether the program says itself when a backward is over: with finalize_backward(), after one or several.

        Call it on the root, and not between a backward and its finalization.

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
        """Sums the gradients that backwards left, and frees full parameters; with `async_op`, wait() completes it.

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
        if state._is_root is None and isinstance(state.unit, _C.Unit):
            return GradientReductionHandle(None) if async_op else None
        _check_root(state, "finalize_backward")
        handle = GradientReductionHandle(state.unit.finalize_backward())
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """After a forward or backward that raised: the next forward begins anew.

        Full parameters are freed, and gradients that are not in `.grad` yet are dropped: of the backward that failed,
        and of those before it without synchronisation. Call it on the root, on all ranks.

        >>> try:
        ...     loss_of(batch).backward()
        ... except RuntimeError:
        ...     model.reset_iter_state()
        """
        _check_root(state := wrapped_state(self), "reset_iter_state")
        state.unit.reset_iter_state()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward averages gradients over the ranks.

        While it is off, each rank accumulates its own gradients, and `.grad` does not show them; the next backward with
        it on averages them all.

        >>> model.set_requires_gradient_sync(False)
        >>> loss_of(first_half).backward()
        >>> model.set_requires_gradient_sync(True)
        >>> loss_of(second_half).backward()
        """
        for unit in units_of(self, recurse):
            unit.set_requires_gradient_sync(requires_gradient_sync)
            unit.set_requires_all_reduce(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether gradients are also averaged over the ranks that hold copies of the shards.

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
        """How many sums of gradients may be under way at a time, each with a buffer of its own; otherwise one.

        The most that any module of a model says counts for all of it. For sums that take longer than the backward
        that could hide them.

        >>> model.set_reduce_scatter_max_input_buffers(2)
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"shardwise: max_input_buffers must be an int, got {type(max_input_buffers).__name__}.")
        if max_input_buffers < 1:
            raise ValueError(f"shardwise: max_input_buffers must be a positive int, got {max_input_buffers}.")
        for unit in units_of(self, recurse):
            unit.set_reduce_scatter_max_input_buffers(max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accepted for compatibility with torch, without effect: sums have process groups of their own here anyway.

        >>> model.set_separate_reduce_scatter_group()
        """

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Calls `hook` with the sum of this module's gradients before it reaches `.grad`; it may change the values.

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
        """What the sum of this module's own gradients is divided by. Default: the number of ranks.

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
