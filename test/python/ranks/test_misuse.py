"""Wrong use is told, by the same exceptions as torch's where torch tells it, and leaves modules as they were."""

from __future__ import annotations

import misuse_running
import misuse_wrapping
import pytest
from engine import TORCH, ours
from misuse import CASES, two_layers
from pool import run_ranks

assert misuse_wrapping and misuse_running, "they fill the list of cases"


def cases_of(rank: int, world_size: int) -> list[str]:
    """Of torch too: what the table says of it must be true."""
    engines = [TORCH] if ours() is TORCH else [TORCH, ours()]
    return [
        f"{engine.name}: rank {rank}: {problem}"
        for engine in engines
        for one in CASES
        if one.ranks == world_size
        for problem in one.problems(engine)
    ]


def a_right_call_after_a_wrong_one(rank: int) -> None:
    misuse_running.right_call_after_a_wrong_one(ours())


def without_a_process_group(rank: int) -> None:
    for wrap in (ours().fully_shard, ours().replicate):
        with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected, but not set"):
            wrap(two_layers())


class TestMisuse:
    def test_there_are_cases(self) -> None:
        assert len(CASES) >= 40
        assert len({one.name for one in CASES}) == len(CASES), "two of one name"
        assert {one.ranks for one in CASES} == {1, 2}

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_is_told(self, world_size: int) -> None:
        problems = [problem for found in run_ranks(world_size, cases_of, world_size) for problem in found]
        assert not problems, "\n".join(problems)

    def test_a_right_call_after_a_wrong_one(self) -> None:
        run_ranks(1, a_right_call_after_a_wrong_one)

    def test_without_a_process_group(self) -> None:
        run_ranks(1, without_a_process_group, backend=None, environment={"MASTER_ADDR": ""})
