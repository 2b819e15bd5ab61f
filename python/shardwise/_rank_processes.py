"""The processes of ranks, for shardwise.testing: what runs in them, and what their parent learns from them."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Job:
    """What a rank needs to know about one run."""

    rank: int
    world_size: int
    backend: str | None
    timeout: float
    environment: dict[str, str]
    folder: str

    @property
    def stack_file(self) -> str:
        """The file to which the rank writes its stacks on SIGUSR1."""
        return f"{self.folder}/stack-{self.rank}"


@dataclass
class Failure:
    """How and when a rank failed; `by_peer` if its error only reports another rank's failure."""

    rank: int
    at: float
    text: str
    by_peer: bool


@dataclass
class RankProcess:
    """The process of one rank, as its parent sees it."""

    number: int
    process: Any
    connection: Connection
    #: Whether its process can be used for another run.
    stays: bool = True

    @staticmethod
    def started(number: int, preload: list[str]) -> RankProcess:
        """A new process, forked from a server that has imported these modules."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preload)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), name=f"rank {number}", daemon=True)
        process.start()
        theirs.close()
        return RankProcess(number, process, ours)

    def end(self) -> None:
        """Kills the process if it still runs."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()

    def receive(self) -> Failure | tuple[Any]:
        """What the rank returned, in a tuple, or how it failed. Blocks until it is known."""
        try:
            succeeded, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Failure(self.number, time.time(), f"The process ended without a result: {how}.", False)
        if not succeeded:
            assert isinstance(value, Failure)
            return value
        result, self.stays = value
        return (result,)


def _serve(connection: Connection) -> None:
    """Runs in a rank's process: does one job after the other, until there are no more or one fails."""
    # A process that crashes prints where: the stacks of C++, and before them those of Python.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    if sys.stderr is not None:
        faulthandler.enable()
    torch.set_num_threads(1)
    seed = torch.initial_seed()
    # Objects that exist now stay: later collections then look only at what a run made.
    gc.freeze()
    while True:
        try:
            job, call = connection.recv()
        except EOFError:
            return
        torch.manual_seed(seed)
        before = dict(os.environ)
        _run(job, connection, call)
        # A wrapped module is a reference cycle, and holds the threads and connections of its process groups.
        gc.collect()
        os.environ.clear()
        os.environ.update(before)


def _run(job: Job, connection: Connection, call: bytes) -> None:
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
                # torch's caches keep meshes, and with them the threads of process groups, until the process ends.
                stays = len(dist.distributed_c10d._world.pg_map) == 1
                # A rank that leaves early would break a collective that others are still in.
                dist.barrier()
                dist.destroy_process_group()
            connection.send((True, (value, stays)))
        except BaseException as error:
            failure = Failure(job.rank, time.time(), traceback.format_exc(), _is_by_peer(error))
            with contextlib.suppress(BrokenPipeError):
                connection.send((False, failure))
            connection.close()
            # Skips the normal shutdown: destroying a process group in the middle of a collective can hang.
            os._exit(1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _is_by_peer(error: BaseException) -> bool:
    signs = ("closed by peer", "reset by peer", "Broken pipe")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)
