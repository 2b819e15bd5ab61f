"""Random programs: torch's engine and ours must show the same.

SHARDWISE_FUZZ_PROGRAMS is how many, SHARDWISE_FUZZ_SEED the first seed. Without the first none is run: they find
differences that docs/python.md lists, and that are not all mended yet.
"""

from __future__ import annotations

import os

import pytest
from engine import TORCH, ours
from fuzz.compare import run_programs
from fuzz.generator import program_of

from shardwise.testing import run_ranks

PROGRAMS = int(os.environ.get("SHARDWISE_FUZZ_PROGRAMS", "0"))
FIRST = int(os.environ.get("SHARDWISE_FUZZ_SEED", "1"))
#: Programs of one set of processes.
TOGETHER = 100


def programs(rank: int, world_size: int, first: int, number: int) -> list[str]:
    return run_programs(rank, world_size, range(first, first + number), [ours(), TORCH])


def number_of(world_size: int) -> int:
    at_two = (3 * PROGRAMS + 4) // 5
    return at_two if world_size == 2 else max(1, PROGRAMS - at_two)


def check_programs(world_size: int) -> None:
    last = FIRST + number_of(world_size)
    for first in range(FIRST, last, TOGETHER):
        number = min(TOGETHER, last - first)
        found = run_ranks(world_size, programs, world_size, first, number, timeout=60 + 20 * number)
        problems = [problem for each in found for problem in each]
        assert not problems, "\n\n".join(problems[:3])


if PROGRAMS:

    class TestPrograms:
        @pytest.mark.parametrize("world_size", [2, 4])
        def test_programs(self, world_size: int) -> None:
            check_programs(world_size)


class TestGenerator:
    def test_programs_have_what_they_should(self) -> None:
        """So that no kind of thing is lost by a change of the generator."""
        texts = [program_of(seed, world_size).text() for seed in range(1, 151) for world_size in (2, 4)]
        for wanted in (
            "replicate(", "fully_shard([", "replicate([", "reshard_after_forward=None", "reshard_after_forward=True",
            "reshard_after_forward=False", "reshard_after_forward=2", "tied_to", "has_spare", "is_checkpointed",
            "optional", "dtype=torch.float64", "param_dtype=torch.bfloat16", "reduce_dtype=torch.float32",
            "output_dtype=torch.float32", "cast_forward_inputs=False", "ignored=", "CPUOffloadPolicy", "last dimension",
            "requires_grad_(True)", "requires_grad_(False)", "set_requires_gradient_sync(False)", "recurse=False",
            "set_requires_all_reduce(False)", "set_is_last_backward(False)", "set_reshard_after_backward(False)",
            "set_reshard_after_forward(", "unshard(async_op=True)", "unshard(async_op=False)", "reshard()",
            "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "2 forward of model",
            "inputs require gradients", "under no_grad", "set_to_none=False", "mesh (2, 2)", "mesh (1, 2)", "opaque ->",
            "keywords ->", "-> namedtuple", "-> dataclass", "nested ->", "1 forward of c",
        ):  # fmt: skip
            assert sum(wanted in text for text in texts) >= 3, wanted
        assert program_of(5, 2).text() == program_of(5, 2).text()
