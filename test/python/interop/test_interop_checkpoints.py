"""State dicts and distributed checkpoints of wrapped models, which torch's engine can read, and whose it writes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine import TORCH, ours
from layouts import RANKS
from parity import Parity, assert_pieces
from pool import run_ranks
from saved_trainings import Training, assert_same_state, leaves_of, program
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

SHARDED = StateDictOptions()
WHOLE = StateDictOptions(full_state_dict=True)
ON_THE_HOST = StateDictOptions(cpu_offload=True)
WHOLE_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

#: How a state is taken, and how it is loaded.
WAYS = ((SHARDED, SHARDED), (ON_THE_HOST, SHARDED), (WHOLE, WHOLE), (WHOLE_ON_RANK_0, FROM_RANK_0))


def goes_on(parity: Parity, training: Training, first: int, last: int) -> None:
    """Every step is that of one process."""
    for number in range(first, last):
        training.run([number])
        values = parity.expected[number].values
        assert_pieces(f"step {number}: the value", training.values(), values, parity.pieces)


def state_dicts(rank: int, layout: str) -> None:
    parity = Parity(program())
    for taken, loaded in WAYS:
        theirs = Training(TORCH, layout, rank, begin=True).run(range(2)).state(taken)
        mine = Training(ours(), layout, rank, begin=True).run(range(2)).state(taken)
        assert_same_state(mine, theirs)
        assert bool(mine["model"]) == (rank == 0 or taken is not WHOLE_ON_RANK_0)
        is_sharded = any(isinstance(value, DTensor) for _, value in leaves_of(mine))
        assert is_sharded == (not taken.full_state_dict)
        # Each engine reads the other's.
        for engine, state in ((ours(), theirs), (TORCH, mine)):
            goes_on(parity, Training(engine, layout, rank).load(state, loaded), 2, 5)


def written(rank: int, engine: str, layout: str, folder: str) -> None:
    training = Training(TORCH if engine == "torch" else ours(), layout, rank, begin=True).run(range(2))
    training.save_to(folder)
    torch.save(training.state(WHOLE), f"{folder}/whole-{rank}.pt")


def read(rank: int, engine: str, layout: str, folder: str) -> None:
    training = Training(TORCH if engine == "torch" else ours(), layout, rank).load_from(folder)
    assert_same_state(training.state(WHOLE), torch.load(f"{folder}/whole-0.pt", weights_only=False))


def loads_say_what_they_loaded(rank: int, layout: str) -> None:
    # R52: no name is left out in silence, neither of a parameter nor of a state of its optimizer.
    for engine in (TORCH, ours()):
        training = Training(engine, layout, rank, begin=True).run(range(2))
        state = training.state(WHOLE)
        names = [name for name, _ in training.model.named_parameters()]
        assert list(state["model"]) == names
        assert list(state["optimizer"]["state"]) == names
        assert all(set(each) == {"step", "exp_avg", "exp_avg_sq"} for each in state["optimizer"]["state"].values())
        target = Training(engine, layout, rank)
        result = set_model_state_dict(target.model, state["model"], options=WHOLE)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert list(target.model.state_dict()) == names
        less = {name: value for name, value in training.model.state_dict().items() if name != "2.bias"}
        assert target.model.load_state_dict(less, strict=False).missing_keys == ["2.bias"]
        with pytest.raises(RuntimeError, match="2.bias"):
            target.model.load_state_dict(less)
        # Gradients that wait for their first step keep torch from making the state: it is empty, and says so nowhere.
        fresh = Training(engine, layout, rank, begin=True)
        program().loss(fresh.model, 0, rank).backward()
        assert get_optimizer_state_dict(fresh.model, fresh.optimizer)["state"] == {}
        fresh.optimizer.step()
        assert list(get_optimizer_state_dict(fresh.model, fresh.optimizer)["state"]) == names


def snapshot_while_training(rank: int, folder: str) -> None:
    # R53: what is written is what was there when it was asked for. R55: a resumed run is saved and resumed again.
    parity = Parity(program())
    training = Training(ours(), "fully_shard", rank, begin=True).run(range(2))
    written = dcp.async_save(training.state(), checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    goes_on(parity, training, 2, 5)
    written.result()
    again = Training(ours(), "fully_shard", rank).load_from(folder)
    goes_on(parity, again, 2, 4)
    again.save_to(f"{folder}-4")
    goes_on(parity, Training(ours(), "fully_shard", rank).load_from(f"{folder}-4"), 4, 6)


class TestInteropStateDicts:
    @pytest.mark.parametrize("layout", ["fully_shard", "mixed", "hsdp"])
    def test_taken_and_loaded(self, layout: str) -> None:
        run_ranks(RANKS[layout], state_dicts, layout)

    def test_nothing_is_left_out(self) -> None:
        run_ranks(2, loads_say_what_they_loaded, "fully_shard")


class TestInteropCheckpoints:
    @pytest.mark.parametrize(("writer", "reader"), [("shardwise", "torch"), ("torch", "shardwise")])
    def test_other_layouts_and_numbers_of_ranks(self, writer: str, reader: str, tmp_path: Path) -> None:
        chain = (("hsdp", 4), ("fully_shard", 3), ("mixed", 2))
        for (first, ranks), (second, others) in pairwise(chain):
            folder = str(tmp_path / f"{first}-{second}")
            run_ranks(ranks, written, writer, first, folder)
            run_ranks(others, read, reader, second, folder)

    def test_a_snapshot_while_training(self, tmp_path) -> None:
        run_ranks(2, snapshot_while_training, str(tmp_path / "snapshot"))
