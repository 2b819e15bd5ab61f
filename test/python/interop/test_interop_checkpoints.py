"""State dicts and distributed checkpoints of wrapped models, which torch's engine can read, and whose it writes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine import TORCH, Engine, ours
from models import assert_same_tree
from pool import on_ranks, run_ranks
from saved_runs import WORLDS, Run, assert_same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

SHARDED = StateDictOptions()
WHOLE = StateDictOptions(full_state_dict=True)
ON_THE_HOST = StateDictOptions(cpu_offload=True)
WHOLE_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

#: How a state is taken, and how it is loaded.
WAYS = ((SHARDED, SHARDED), (ON_THE_HOST, SHARDED), (WHOLE, WHOLE), (WHOLE_ON_RANK_0, FROM_RANK_0))
ENGINES = {"torch": TORCH, "shardwise": ours()}


def state_of(run: Run, options: StateDictOptions | None = None) -> dict[str, Any]:
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    return {"model": model, "optimizer": optimizer}


def load(run: Run, state: dict[str, Any], options: StateDictOptions | None = None) -> Run:
    # R52: no name is left out in silence. A state dict that has nothing on this rank lets torch's set_state_dict()
    # pass over it.
    result = set_model_state_dict(run.model, state["model"], options=options)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    set_optimizer_state_dict(run.model, run.optimizer, optim_state_dict=state["optimizer"], options=options)
    return run


def save_to(run: Run, folder: str) -> None:
    dcp.save(state_of(run), checkpoint_id=folder)


def load_from(run: Run, folder: str) -> Run:
    state = state_of(run)
    dcp.load(state, checkpoint_id=folder)
    return load(run, state)


def state_dicts(rank: int, name: str) -> None:
    straight = Run(name, rank).train(0, 4).whole()

    def begun(engine: Engine) -> Run:
        return Run(name, rank, engine=engine).train(0, 2)

    for taken, loaded in WAYS:
        theirs, mine = (state_of(begun(engine), taken) for engine in (TORCH, ours()))
        assert_same_tree(mine, theirs)
        assert bool(mine["model"]) == (rank == 0 or taken is not WHOLE_ON_RANK_0)
        is_sharded = any(isinstance(value, DTensor) for value in tree_leaves(mine))
        assert is_sharded == (not taken.full_state_dict)
        # Each engine reads the other's, and goes on; R46: state that is made before it is loaded leaves no trace.
        for engine, state in ((ours(), theirs), (TORCH, mine)):
            again = load(Run(name, rank, lr=0.5, engine=engine).spoil(), state, loaded)
            assert_same(again.train(2, 4).whole(), straight)


def written(rank: int, engine: str, name: str, folder: str) -> None:
    run = Run(name, rank, engine=ENGINES[engine]).train(0, 2)
    save_to(run, folder)
    torch.save(state_of(run, WHOLE), f"{folder}/whole-{rank}.pt")


def read(rank: int, engine: str, name: str, folder: str) -> None:
    run = load_from(Run(name, rank, lr=0.5, engine=ENGINES[engine]).spoil(), folder)
    assert_same_tree(state_of(run, WHOLE), torch.load(f"{folder}/whole-0.pt", weights_only=False))


def snapshot_while_training(rank: int, folder: str) -> None:
    # R53: what is written is what was there when it was asked for. R55: a resumed run is saved and resumed again.
    run = Run("rows of 2", rank).train(0, 2)
    saving = dcp.async_save(state_of(run), checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    run.train(2, 5)
    saving.result()
    save_to(load_from(Run("rows of 2", rank).spoil(), folder).train(2, 4), f"{folder}-4")
    again = load_from(Run("rows of 2", rank).spoil(), f"{folder}-4").train(4, 5)
    assert_same(again.whole(), run.whole())


class TestInteropStateDicts:
    test_taken_and_loaded = on_ranks(WORLDS, state_dicts, each=["rows of 2", "mixed", "2 copies of 2"])


class TestInteropCheckpoints:
    @pytest.mark.parametrize(("writer", "reader"), [("shardwise", "torch"), ("torch", "shardwise")])
    def test_other_layouts_and_numbers_of_ranks(self, writer: str, reader: str, tmp_path: Path) -> None:
        for first, second in pairwise(("2 copies of 2", "rows of 3", "mixed")):
            folder = str(tmp_path / f"{first}-{second}")
            run_ranks(WORLDS[first], written, writer, first, folder)
            run_ranks(WORLDS[second], read, reader, second, folder)

    test_a_snapshot_while_training = on_ranks(2, snapshot_while_training, path="snapshot")
