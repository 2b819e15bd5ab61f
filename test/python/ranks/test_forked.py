"""A process that a rank forks, to save a snapshot or to load data, while the rank trains on (T44). The same rows as
test/cpp/ranks/forked_test.cpp."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import KINDS, ours
from models import Beside, batch, local, mlp
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.testing import run_ranks


def refused(texts: str | tuple[str, ...], act: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=texts if isinstance(texts, str) else "|".join(texts)):
        act()


def look_as_child(rank: int, model: nn.Module, values: list[torch.Tensor]) -> None:
    for (name, parameter), value in zip(model.named_parameters(), values, strict=True):
        if isinstance(parameter, DTensor) and not parameter.placements[0].is_replicate():
            refused("forked from a rank", lambda p=parameter: local(p).sum())
            refused("forked from a rank", lambda p=parameter: local(p).add_(1))
            continue
        assert torch.equal(local(parameter), value), f"{name} is not what it was at the fork"
        local(parameter).add_(1)
    gradient = next(model.parameters()).grad
    assert gradient is not None
    refused("forked from a rank", lambda: (gradient.to_local() if isinstance(gradient, DTensor) else gradient).sum())
    if isinstance(model, shardwise.FSDPModule):
        model.reshard()
    # A replicated unit has nothing to gather; torch itself runs no backward in a child.
    refused(("forked from a rank", "Autograd-and-Fork"), lambda: model(batch(7, rank, 4)).sum().backward())
    refused("forked from a rank and cannot use", lambda: dist.all_reduce(torch.ones(1)))


def fork_while_training(rank: int) -> None:
    for kind in ("sharded", "kept", "replicated"):
        both = Beside(mlp(4, 6, 3), partial(KINDS[kind], ours()))
        both.train([0])
        both.backward(1)
        values = [local(parameter).clone() for parameter in both.model.parameters()]
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                assert os.read(told, 1) == b"x"
                look_as_child(rank, both.model, values)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        both.step()
        both.train((2, 3))
        os.write(tell, b"x")
        _, status = os.waitpid(child, 0)
        assert status == 0, f"{kind}: see what the child printed"
        both.train([4])


def fork_in_a_forward(rank: int) -> None:
    """By another thread than the one that runs it, which does not exist in the child."""

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                with torch.no_grad():
                    model(batch(7, rank, 4))
            except RuntimeError as error:
                os._exit(0 if "forked from a rank" in str(error) else 1)
            os._exit(2)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def fork_once(*_: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    statuses: list[int] = []
    model: Any = mlp(4, 6, 3)
    for module in (model[0], model):
        shardwise.fully_shard(module)
    for register in (model[0].register_forward_hook, model[0].register_full_backward_hook):
        hook = register(fork_once)
        model(batch(0, rank, 4)).sum().backward()
    assert statuses == [0, 0], "1: the child got another error; 2: it got none"


class TestForked:
    def test_a_child_has_what_its_parent_had_or_an_error_and_changes_nothing(self) -> None:
        run_ranks(2, fork_while_training, backend="shardwise")

    def test_a_child_forked_within_a_forward_or_a_backward(self) -> None:
        run_ranks(2, fork_in_a_forward, backend="shardwise")
