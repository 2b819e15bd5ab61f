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
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise._C import PeerError

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
    """Runs `function(rank, *args)` in `world_size` processes and returns the results by rank.

    The function, its arguments and its results must be picklable: give a function of a module, not a lambda. Each rank
    has the default process group (none with backend=None), RANK and WORLD_SIZE, and one thread for tensor operations.

    Raises RankFailure with the error of the rank that failed first: an error that only tells of another rank's
    failure gives way to its cause. Past `timeout` seconds it raises TimeoutError with the stack of every rank.
    """
    if world_size < 1:
        raise ValueError(f"shardwise: run_ranks needs 1 rank or more, and got {world_size}.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            job = _Job(rank, world_size, backend, timeout, dict(environment or {}), folder)
            process = context.Process(target=_run, args=(job, theirs, function, args), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(rank, process, ours))
        name = getattr(function, "__qualname__", repr(function))
        try:
            _collect(ranks, name, timeout, Path(folder))
            for each in ranks:
                each.process.join(_GRACE)
        finally:
            for each in ranks:
                each.end()
        return [each.value for each in ranks]


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
    results: Connection
    value: Any = None

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.results.close()


def _run(job: _Job, results: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    os.environ.update(job.environment)
    torch.set_num_threads(1)
    with open(job.stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        failure: _Failure | None = None
        try:
            if job.backend is not None:
                dist.init_process_group(
                    job.backend,
                    init_method=f"file://{job.folder}/store",
                    rank=job.rank,
                    world_size=job.world_size,
                    timeout=timedelta(seconds=job.timeout),
                )
            value = function(job.rank, *args)
            if dist.is_initialized():
                # A rank that leaves early would break a collective that others are still in.
                dist.barrier()
            results.send((True, value))
        except BaseException as error:
            failure = _Failure(job.rank, time.time(), traceback.format_exc(), _is_by_peer(error))
            with contextlib.suppress(BrokenPipeError):
                results.send((False, failure))
    results.close()
    if failure is not None:
        # Without the usual ending: destroying a process group in the middle of a collective can hang.
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_by_peer(error: BaseException) -> bool:
    signs = ("closed by peer", "reset by peer", "Broken pipe")
    return isinstance(error, (PeerError, dist.DistError)) or any(sign in str(error) for sign in signs)


def _collect(ranks: list[_Rank], name: str, timeout: float, folder: Path) -> None:
    failures: list[_Failure] = []
    deadline = time.monotonic() + timeout
    open_ranks = {rank.results: rank for rank in ranks}
    while open_ranks:
        left = deadline - time.monotonic()
        if left <= 0 and failures:
            break
        if left <= 0:
            raise TimeoutError(_stacks(open_ranks.values(), name, timeout, folder))
        for ready in wait(list(open_ranks), timeout=left):
            assert isinstance(ready, Connection)
            rank = open_ranks.pop(ready)
            failure = _receive(rank)
            if failure is not None:
                failures.append(failure)
                deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        first = min(failures, key=lambda failure: (failure.by_peer, failure.at))
        others = sorted({failure.rank for failure in failures} - {first.rank})
        note = f"\n(ranks {others} failed too)" if others else ""
        raise RankFailure(first.rank, f"{name}: rank {first.rank} of {len(ranks)} failed:\n{first.text}{note}")


def _receive(rank: _Rank) -> _Failure | None:
    try:
        succeeded, value = rank.results.recv()
    except EOFError:
        rank.process.join()
        code = rank.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _Failure(rank.number, time.time(), f"The process ended without a result: {how}.", False)
    if succeeded:
        rank.value = value
        return None
    assert isinstance(value, _Failure)
    return value


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
