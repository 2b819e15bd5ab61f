"""What TORCH_LOGS="+shardwise" shows: the forwards and backwards of units, in the words of torch's own engine."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._pytree import tree_leaves

_logger = logging.getLogger("shardwise")


class LoggedState(FSDPState):
    """What it takes to log the events of a call."""

    #: The path of the first module from the root; empty until the root runs.
    name = ""
    log: Log | None = None


class Log:
    """Logs the events of one call, with hooks of its own: a backward is noticed at the modules' inputs and outputs."""

    def __init__(self, state: LoggedState) -> None:
        self._state = state
        self._in_backward = False

    def register(self, module: nn.Module) -> None:
        """From now on the module's forwards are logged."""
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward)

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The module begins, with these inputs."""
        if self._state._is_root and module is self._state._modules[0]:
            self._state._state_ctx.post_backward_final_callback_queued = False
            _logger.debug("FSDP::root_pre_forward")
        self._say("pre_forward")
        for tensor in _with_gradient((args, kwargs)):
            tensor.register_hook(self._post_backward)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module ends, with these outputs."""
        self._say("post_forward")
        for tensor in _with_gradient(output):
            tensor.register_hook(self._pre_backward)

    def _pre_backward(self, gradient: torch.Tensor) -> None:
        context = self._state._state_ctx
        if not context.post_backward_final_callback_queued:
            context.post_backward_final_callback_queued = True
            engine: Any = Variable._execution_engine
            engine.queue_callback(partial(_root_post_backward, context))
        if not self._in_backward:
            self._in_backward = True
            self._say("pre_backward")

    def _post_backward(self, gradient: torch.Tensor | None = None) -> None:
        if self._in_backward:
            self._in_backward = False
            self._say("post_backward")

    def _say(self, what: str) -> None:
        name = self._state.name
        _logger.debug("FSDP::%s%s", what, f" ({name})" if name else "")


def log_of(state: LoggedState) -> Log | None:
    """A log, or None if nobody listens: then logging costs nothing."""
    return Log(state) if _logger.isEnabledFor(logging.DEBUG) else None


def _root_post_backward(context: Any) -> None:
    """Ends the backward of modules whose inputs need no gradient."""
    for state in cast("list[LoggedState]", context.all_states):
        if state.log is not None:
            state.log._post_backward()
    context.post_backward_final_callback_queued = False
    _logger.debug("FSDP::root_post_backward")


def _with_gradient(values: Any) -> list[torch.Tensor]:
    if not torch.is_grad_enabled():
        return []
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.requires_grad]
