"""What ranks record: the units and collectives of a step, from their begin to their end, and nothing when it is off."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from checkout import output_of
from models import batch, mlp
from pool import run_ranks

import shardwise
from shardwise import _record_files, _timeline

#: A world of one.
PROGRAM = """
import sys
import torch
import shardwise
model = shardwise.fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
with shardwise.record(sys.argv[1]):
    model(torch.ones(2, 4)).sum().backward()
"""


def steps_recorded(rank: int, folder: str) -> None:
    model = mlp(5, 6, 3)
    for module in (model[0], model):
        shardwise.fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(batch(0, rank, 5, 2)).sum().backward()
        optimizer.step()

    step()
    with shardwise.record(folder):
        step()
        step()
    step()


def unwritable(rank: int) -> None:
    model = mlp(5, 6, 3)
    with pytest.raises(shardwise.Error, match="cannot be written to .*SHARDWISE_RECORD"):
        shardwise.fully_shard(model)


def of(events: list[_record_files.Event], rank: int, kind: str) -> list[_record_files.Event]:
    return [event for event in events if event.rank == rank and event.kind == kind]


class TestRecord:
    def test_sharded(self, tmp_path: Path) -> None:
        run_ranks(2, steps_recorded, str(tmp_path), backend="shardwise")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["shardwise-rank0.json", "shardwise-rank1.json"]
        events = _record_files.read(tmp_path)
        for rank in (0, 1):
            assert len(_timeline.steps(events, rank)) == 2
            for name, kind in product(("(root)", "0"), ("forward", "backward")):
                assert len([e for e in of(events, rank, kind) if e.name == name]) == 2, (rank, name, kind)
            # The root stays whole after forward: two gathers there and one in backward, two sums; twice.
            gathers, sums = of(events, rank, "all-gather"), of(events, rank, "reduce-scatter")
            assert (len(gathers), len(sums)) == (6, 4)
            assert {event.name for event in of(events, rank, "wait")} <= {event.name for event in (*gathers, *sums)}
        assert 0 <= _timeline.hidden(events, 0) <= 1

    def test_a_variable_records_a_whole_program(self, tmp_path: Path) -> None:
        output_of("-c", PROGRAM, tmp_path / "inside", SHARDWISE_RECORD=str(tmp_path / "all"))
        for folder, steps in (("all", 2), ("inside", 1)):
            assert len(_timeline.steps(_record_files.read(tmp_path / folder), 0)) == steps

    def test_a_folder_that_cannot_be_written_is_said_at_the_start(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        ran = False
        said = rf"rank 0: .* cannot be written to {tmp_path}/file/.*Not a directory"
        with pytest.raises(shardwise.Error, match=said), shardwise.record(tmp_path / "file" / "folder"):
            ran = True
        assert not ran
        run_ranks(1, unwritable, environment={"SHARDWISE_RECORD": str(tmp_path / "file")})
