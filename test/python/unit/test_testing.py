"""shardwise.testing.run_ranks: results, failures, time limits. Its functions run in ranks of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.testing import RankFailure, RankPool, run_ranks


def describe(rank: int, text: str) -> tuple[int, str, str, int, float]:
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    return rank, text, os.environ["EXTRA"], torch.get_num_threads(), tensor.item()


def without_process_group(rank: int) -> tuple[bool, str | None, str | None]:
    return dist.is_initialized(), os.environ.get("RANK"), os.environ.get("WORLD_SIZE")


def fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise LookupError("on purpose")
    dist.barrier()


def all_fail_later_than_two(rank: int) -> None:
    time.sleep(0.2 if rank == 2 else 1.5)
    raise LookupError(f"rank {rank} speaking")


def fail_by_peer_first(rank: int) -> None:
    if rank == 0:
        raise shardwise.PeerError("the other rank is gone")
    time.sleep(0.5)
    raise LookupError("the cause")


def killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crashes(rank: int, errors: str) -> None:
    if rank == 1:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        os.abort()


def stuck_here(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)


def returns_a_lambda(rank: int) -> object:
    return lambda: rank


def leaves(rank: int) -> NoReturn:
    raise SystemExit(3)


def test_results_by_rank_with_arguments_and_environment() -> None:
    results = run_ranks(3, describe, "text", environment={"EXTRA": "yes"})
    assert results == [(rank, "text", "yes", 1, 6.0) for rank in range(3)]


def test_a_crash_prints_the_stack_of_python(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with pytest.raises(RankFailure, match=r"rank 1 of 2 failed(.|\n)*signal SIGABRT"):
        run_ranks(2, crashes, str(errors), backend=None)
    # Those of C++ follow if the heap is sound: torch's handler of signals takes memory.
    assert "in crashes\n" in errors.read_text()


def test_without_a_process_group() -> None:
    assert run_ranks(2, without_process_group, backend=None) == [(False, "0", "2"), (False, "1", "2")]


def test_a_failure_names_the_rank_and_shows_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(
        RankFailure, match=r"(?s)fail_on_rank_one: rank 1 of 2 failed:.*LookupError: on purpose"
    ) as caught:
        run_ranks(2, fail_on_rank_one)
    assert caught.value.rank == 1
    assert time.monotonic() - started < 60, "the rank that waits does not hold up the report"


FAILURES = {
    "the first is told": (3, all_fail_later_than_two, r"rank 2 speaking(.|\n)*ranks \[0, 1\] failed too"),
    "that of a peer gives way to its cause": (2, fail_by_peer_first, "rank 1 of 2 failed(.|\n)*the cause"),
    "a killed rank": (2, killed, "rank 1 of 2 failed(.|\n)*signal SIGKILL"),
    "a result that cannot be sent": (1, returns_a_lambda, r"(?i)pickle"),
    "an exit": (1, leaves, "SystemExit: 3"),
}


@pytest.mark.parametrize(("world_size", "function", "text"), FAILURES.values(), ids=FAILURES.keys())
def test_failures(world_size: int, function: Callable[[int], object], text: str) -> None:
    with pytest.raises(RankFailure, match=text):
        run_ranks(world_size, function)


def test_past_the_time_limit_the_stacks_are_shown() -> None:
    with pytest.raises(TimeoutError, match=r"(?s)stuck_here did not end within 5 s.*rank 1:.*in stuck_here"):
        run_ranks(2, stuck_here, timeout=5)


def test_bad_arguments_are_an_error() -> None:
    with pytest.raises(ValueError, match="world_size must be 1 or more, not 0"):
        run_ranks(0, describe)


def what_a_new_process_has(rank: int, environment: str) -> tuple[int, float, str | None, float]:
    found = (os.getpid(), torch.rand(1).item(), os.environ.pop("EXTRA", None))
    os.environ["LEFT"] = environment
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    return *found, tensor.item()


def what_is_left(rank: int) -> tuple[str | None, bool]:
    return os.environ.get("LEFT"), dist.is_initialized()


def test_a_pool_keeps_its_processes_and_nothing_else() -> None:
    with RankPool(2) as pool:
        first = pool.run(what_a_new_process_has, "a", environment={"EXTRA": "yes"})
        second = pool.run(what_a_new_process_has, "b")
        assert [each[0] for each in first] == [each[0] for each in second]
        assert first[0][1] == second[0][1] == first[1][1], "random numbers begin anew"
        assert [each[2:] for each in first + second] == [("yes", 3.0)] * 2 + [(None, 3.0)] * 2
        assert pool.run(what_is_left, backend=None) == [(None, False)] * 2


def test_a_pool_has_new_processes_after_a_failure() -> None:
    with RankPool(2) as pool:
        before = pool.run(without_process_group, backend=None)
        with pytest.raises(RankFailure, match="rank 1 of 2 failed(.|\n)*on purpose"):
            pool.run(fail_on_rank_one)
        with pytest.raises(RankFailure, match="rank 1 of 2 failed(.|\n)*signal SIGKILL"):
            pool.run(killed)
        assert pool.run(without_process_group, backend=None) == before
        ranks = [rank.process for rank in pool._ranks]
    assert [rank.exitcode for rank in ranks] == [0, 0]
