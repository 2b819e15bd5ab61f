"""Ranks that are threads of one process, in torch's own process group for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import TORCH, ours
from layouts import RANKS, by_layer
from parity import Parity, assert_same_bits
from torch import nn
from training_models import mlp_program

from shardwise.testing import run_ranks


@dataclass
class Threads:
    """Ranks that are threads of this process, in torch's own process group for them."""

    world: int
    errors: list[BaseException] = field(default_factory=list)

    def run(self, function: Callable[[int], None]) -> None:
        from torch.testing._internal.distributed import multi_threaded_pg as threaded

        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        store = dist.HashStore()
        try:
            threads = [
                threading.Thread(target=self._rank, args=(rank, store, function, threaded), daemon=True)
                for rank in range(self.world)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            if self.errors:
                raise self.errors[0]
            assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        finally:
            threaded.ProcessLocalGroup.reset()
            threaded._uninstall_threaded_pg()
            torch._C._distributed_c10d._set_thread_isolation_mode(False)

    def _rank(self, rank: int, store: Any, function: Callable[[int], None], threaded: Any) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=self.world, store=store)
        try:
            function(rank)
        except BaseException as error:
            self.errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)


def threaded_ranks(_: int, layout: str, world: int, options: dict[str, Any]) -> None:
    def train(rank: int) -> None:
        # Models are made from torch's one generator: by one thread at a time.
        parity = Parity(locked_program)
        theirs = parity.run(TORCH, by_layer(layout, **options))
        assert_same_bits(parity.run(ours(), by_layer(layout, **options)), theirs)

    lock = threading.Lock()
    program = mlp_program((5, 7, 3, 1), steps=4)

    def make() -> nn.Module:
        with lock:
            return program.make()

    locked_program = type(program)(make, program.loss, steps=4)
    Threads(world).run(train)


class TestInteropRanks:
    @pytest.mark.parametrize("layout", ["replicate", "hsdp"])
    def test_threads(self, layout: str) -> None:
        run_ranks(1, threaded_ranks, layout, RANKS[layout], {}, backend=None)

    def test_threads_that_hold_everything_in_pairs(self) -> None:
        run_ranks(1, threaded_ranks, "fully_shard", 4, {"reshard_after_forward": 2}, backend=None)
