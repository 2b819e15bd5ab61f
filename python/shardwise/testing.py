"""Tests with several ranks on one machine, for shardwise and for programs that use it.

>>> def check_sum(rank: int) -> float:
...     tensor = torch.tensor([float(rank)])
...     torch.distributed.all_reduce(tensor)
...     return tensor.item()
>>> run_ranks(2, check_sum)
[1.0, 1.0]
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

#: Modules that ranks find imported; each rank is forked from a server that imported them and computed nothing.
PRELOAD = ["torch", "torch.distributed", "torch.distributed.device_mesh", "shardwise.testing"]

#: After the first rank failed, the others have this long to fail by themselves.
_GRACE = 3.0


class RankFailure(RuntimeError):
    """A rank failed; the text has its number and its traceback. `rank` is the first that failed by itself."""

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

    The function, its arguments and its results must be picklable: give a function of a module, not a lambda. Each rank
    has the default process group (none with backend=None), RANK and WORLD_SIZE, and one thread for tensor operations.

    Raises RankFailure with the error of the rank that failed first: an error that only tells of another rank's
    failure gives way to its cause. Past `timeout` seconds it raises TimeoutError with the stack of every rank.
    """
    with RankPool(world_size) as pool:
        return pool.run(function, *args, backend=backend, timeout=timeout, environment=environment)


class RankPool:
    """Ranks that stay between runs, for suites of many short tests: most of a short run is starting its processes.

    Each run has a process group of its own and the random numbers of a new process. After a run that failed, and after
    one that made more process groups, the processes are ended, and the next run has new ones. Close the pool when it is
    no longer needed, or use `with`.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"shardwise: run_ranks needs 1 rank or more, and got {world_size}.")
        self.world_size = world_size
        self._ranks: list[_Rank] = []

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        backend: str | None = "gloo",
        timeout: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> list[T]:
        """As run_ranks() does."""
        call = bytes(ForkingPickler.dumps((function, args)))
        if not self._ranks:
            self._ranks = [_Rank.started(number) for number in range(self.world_size)]
        name = getattr(function, "__qualname__", repr(function))
        done = False
        try:
            with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
                for rank in self._ranks:
                    job = _Job(rank.number, self.world_size, backend, timeout, dict(environment or {}), folder)
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
        """Lets the processes end by themselves, and ends those that do not."""
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


@dataclass(frozen=True)
class _Job:
    rank: int
    world_size: int
    backend: str | None
    timeout: float
    environment: dict[str, str]
    folder: str

    @property
    def stack_file(self) -> str:
        return f"{self.folder}/stack-{self.rank}"


@dataclass
class _Failure:
    rank: int
    at: float
    text: str
    by_peer: bool


@dataclass
class _Rank:
    number: int
    process: Any
    connection: Connection
    #: Whether its process is as good as a new one.
    stays: bool = True

    @staticmethod
    def started(number: int) -> _Rank:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), name=f"rank {number}", daemon=True)
        process.start()
        theirs.close()
        return _Rank(number, process, ours)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection) -> None:
    """What a rank's process does: one job after the other, until there are no more or one fails."""
    torch.set_num_threads(1)
    seed = torch.initial_seed()
    # What is here now stays: a collection after each run then looks at that run's alone.
    gc.freeze()
    while True:
        try:
            job, call = connection.recv()
        except EOFError:
            return
        torch.manual_seed(seed)
        before = dict(os.environ)
        _run(job, connection, call)
        # A wrapped module is a cycle, and holds the threads and connections of its process groups.
        gc.collect()
        os.environ.clear()
        os.environ.update(before)


def _run(job: _Job, connection: Connection, call: bytes) -> None:
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    os.environ.update(job.environment)
    with open(job.stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            if job.backend is not None:
                dist.init_process_group(
                    job.backend,
                    init_method=f"file://{job.folder}/store",
                    rank=job.rank,
                    world_size=job.world_size,
                    timeout=timedelta(seconds=job.timeout),
                )
            function, args = pickle.loads(call)
            value = function(job.rank, *args)
            stays = True
            if dist.is_initialized():
                # torch's caches keep meshes, and so the threads of process groups, for as long as the process lives.
                stays = len(dist.distributed_c10d._world.pg_map) == 1
                # A rank that leaves early would break a collective that others are still in.
                dist.barrier()
                dist.destroy_process_group()
            connection.send((True, (value, stays)))
        except BaseException as error:
            failure = _Failure(job.rank, time.time(), traceback.format_exc(), _is_by_peer(error))
            with contextlib.suppress(BrokenPipeError):
                connection.send((False, failure))
            connection.close()
            # Without the usual ending: destroying a process group in the middle of a collective can hang.
            os._exit(1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _is_by_peer(error: BaseException) -> bool:
    signs = ("closed by peer", "reset by peer", "Broken pipe")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def _collect(ranks: list[_Rank], name: str, timeout: float, folder: Path) -> list[Any]:
    failures: list[_Failure] = []
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
            result = _receive(rank)
            if isinstance(result, _Failure):
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


def _receive(rank: _Rank) -> _Failure | tuple[Any]:
    try:
        succeeded, value = rank.connection.recv()
    except (EOFError, ConnectionResetError):
        rank.process.join()
        code = rank.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _Failure(rank.number, time.time(), f"The process ended without a result: {how}.", False)
    if not succeeded:
        assert isinstance(value, _Failure)
        return value
    result, rank.stays = value
    return (result,)


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
