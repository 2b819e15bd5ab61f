"""Tests with several ranks on one machine, for shardwise and for programs that use it.

>>> def check_sum(rank: int) -> float:
...     tensor = torch.tensor([float(rank)])
...     torch.distributed.all_reduce(tensor)
...     return tensor.item()
>>> run_ranks(2, check_sum)
[1.0, 1.0]
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

from shardwise._rank_processes import Failure, Job, RankProcess

T = TypeVar("T")

#: Modules that ranks find already imported: each rank is forked from a server that imported them and ran nothing else.
PRELOAD = ["torch", "torch.distributed", "torch.distributed.device_mesh", "shardwise.testing"]

#: Once a rank has failed, the others have this long to fail by themselves.
_GRACE = 3.0


class RankFailure(RuntimeError):
    """A rank failed. The text has its number and its traceback; `rank` is the first rank that failed by itself."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


def run_ranks(
    world_size: int,
    function: Callable[..., T],
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[T]:
    """Runs `function(rank, *args)` in `world_size` new processes and returns the results by rank.

    The function, its arguments and its results must be picklable: pass a module-level function, not a lambda. Each rank
    has the default process group (none with backend=None), RANK and WORLD_SIZE, and one thread for tensor operations.

    Raises RankFailure with the error of the rank that failed first; an error that only reports another rank's failure
    counts as later. After `timeout` seconds it raises TimeoutError with the stack of every rank.
    """
    with RankPool(world_size) as pool:
        return pool.run(function, *args, backend=backend, timeout=timeout, environment=environment)


class RankPool:
    """Ranks whose processes stay between runs: suites of short tests need not wait for new processes.

    Each run has its own process group, and the random numbers of a new process. If a run fails or makes more process
    groups, its processes end, and the next run gets new ones. Use it in `with`, or call close().
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"shardwise: world_size must be 1 or more, not {world_size}.")
        self.world_size = world_size
        self._ranks: list[RankProcess] = []

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        backend: str | None = "gloo",
        timeout: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Like run_ranks()."""
        call = bytes(ForkingPickler.dumps((function, args)))
        if not self._ranks:
            self._ranks = [RankProcess.started(number, PRELOAD) for number in range(self.world_size)]
        name = getattr(function, "__qualname__", repr(function))
        done = False
        try:
            with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
                for rank in self._ranks:
                    job = Job(rank.number, self.world_size, backend, timeout, dict(environment or {}), folder)
                    rank.connection.send((job, call))
                values = _collect(self._ranks, name, timeout, Path(folder))
                done = True
                if not all(rank.stays for rank in self._ranks):
                    self.close()
                return values
        finally:
            if not done:
                self._end()

    def close(self) -> None:
        """Lets the processes end by themselves, and kills those that do not."""
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            rank.process.join(_GRACE)
        self._end()

    def _end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _collect(ranks: list[RankProcess], name: str, timeout: float, folder: Path) -> list[Any]:
    failures: list[Failure] = []
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    open_ranks = {rank.connection: rank for rank in ranks}
    while open_ranks:
        left = deadline - time.monotonic()
        if left <= 0 and failures:
            break
        if left <= 0:
            raise TimeoutError(_stacks(open_ranks.values(), name, timeout, folder))
        for ready in wait(list(open_ranks), timeout=left):
            assert isinstance(ready, Connection)
            rank = open_ranks.pop(ready)
            result = rank.receive()
            if isinstance(result, Failure):
                failures.append(result)
                deadline = min(deadline, time.monotonic() + _GRACE)
            else:
                (values[rank.number],) = result
    if failures:
        first = min(failures, key=lambda failure: (failure.by_peer, failure.at))
        others = sorted({failure.rank for failure in failures} - {first.rank})
        note = f"\n(ranks {others} failed too)" if others else ""
        raise RankFailure(first.rank, f"{name}: rank {first.rank} of {len(ranks)} failed:\n{first.text}{note}")
    return [values[rank.number] for rank in ranks]


def _stacks(ranks: Any, name: str, timeout: float, folder: Path) -> str:
    text = f"shardwise: {name} did not end within {timeout:g} s. The ranks that still ran, and where:"
    ranks = list(ranks)
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    for rank in ranks:
        stack = (folder / f"stack-{rank.number}").read_text() or "(no stack)\n"
        text += f"\nrank {rank.number}:\n{stack}"
    return text
