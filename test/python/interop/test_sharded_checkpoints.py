"""shardwise.checkpoint: what any ranks saved, any others load; and what goes wrong is told before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkout import python
from form import by_form
from models import local
from pool import on_ranks, run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from saved_runs import WIDTH, WORLDS, Run, assert_same, spoil, whole_of
from torch import nn
from training_models import mlps

import shardwise
from shardwise import checkpoint


def saved(rank: int, name: str, folder: str) -> None:
    run = Run(name, rank).train(0, 3)
    checkpoint.save(folder, run.model, run.optimizer, values={"step": 3, "losses": [0.5, float("inf")]})
    whole = run.whole()
    if rank == 0:
        torch.save(whole, f"{folder}.pt")


def loaded(rank: int, name: str, folder: str) -> None:
    expected = torch.load(f"{folder}.pt")
    run = Run(name, rank, lr=0.5).spoil()
    found = checkpoint.load(folder, run.model, run.optimizer)
    assert found.values == {"step": 3, "losses": [0.5, float("inf")]}
    assert (found.missing, found.unexpected, found.tensors) == ([], [], {})
    assert_same(run.whole(), expected)
    run.train(3, 4)


def resumed(rank: int, name: str, folder: str) -> None:
    straight = Run(name, rank).train(0, 3)
    checkpoint.save(folder, straight.model, straight.optimizer)
    # What kept full copies, or state from before, would leave behind.
    again = Run(name, rank, lr=0.5).train(7, 9)
    parameters = list(again.model.parameters())
    checkpoint.load(folder, again.model, again.optimizer)
    assert all(one is other for one, other in zip(parameters, again.model.parameters(), strict=True))
    assert_same(again.train(3, 6).whole(), straight.train(3, 6).whole())


def dtypes(rank: int, folder: str) -> None:
    for dtype in (torch.double, torch.bfloat16, torch.half):

        def sharded(dtype: torch.dtype = dtype) -> nn.Module:
            model = mlps(WIDTH, 1).to(dtype)
            model.register_buffer("mask", torch.tensor([True, False, True]))
            return shardwise.fully_shard(model)

        model, other = sharded(), sharded()
        own = {"common": torch.arange(4), f"of rank {rank}": torch.full((2,), rank), "none": torch.empty(0, 3)}
        average = {name: value.detach() * 2 for name, value in model.named_parameters()}
        tensors = own | {f"average.{name}": value for name, value in average.items()}
        checkpoint.save(folder, model, tensors=tensors, values={"name": "a", "true": True})
        spoil(other)
        zeros = {f"average.{name}": torch.zeros_like(value) for name, value in average.items()}
        found = checkpoint.load(folder, other, tensors=zeros)
        assert_same(whole_of(other), whole_of(model))
        assert found.values == {"name": "a", "true": True}
        for name, value in average.items():
            assert found.tensors[f"average.{name}"] is zeros[f"average.{name}"]
            assert torch.equal(local(zeros[f"average.{name}"]), local(value)), name
        for name in ("common", "none"):
            assert torch.equal(found.tensors[name], own[name]), name
        for number in range(2):
            assert torch.equal(found.tensors[f"of rank {number}"], torch.full((2,), number))


def does_not_fit(rank: int, folder: str) -> None:
    def sharded(width: int, count: int) -> nn.Module:
        return shardwise.fully_shard(mlps(width, count))

    def refuses(model: nn.Module, match: str, *more: Any, **options: Any) -> None:
        before = whole_of(model)
        with pytest.raises(shardwise.Error, match=match):
            checkpoint.load(folder, model, *more, **options)
        assert_same(whole_of(model), before)

    model = sharded(WIDTH, 2)
    checkpoint.save(folder, model)
    refuses(sharded(WIDTH, 3), "nothing was loaded:\n  missing in the checkpoint: 2.in_proj.weight")
    refuses(sharded(WIDTH, 1), r"neither in the model nor in the optimizer: 1\.in_proj")
    refuses(sharded(6, 2), r"'0\.in_proj\.weight' has shape \[24, 6\] here and \[20, 5\] there")
    refuses(shardwise.fully_shard(mlps(WIDTH, 2).half()), "is float16 here and float32 there")
    more = sharded(WIDTH, 3)
    assert len(checkpoint.load(folder, more, strict=False).missing) == 4
    adam = torch.optim.AdamW(model.parameters())
    refuses(model, r"missing in the checkpoint: optimizer\.param_groups\.0\.in_proj\.weight\.lr", adam)
    # An optimizer of another class.
    checkpoint.save(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    refuses(model, r"missing in the checkpoint: optimizer\.param_groups\.0\.in_proj\.weight\.betas", adam)
    with pytest.raises(ValueError, match="a parameter of shape .* that the model does not have"):
        checkpoint.save(folder, model, torch.optim.AdamW(more.parameters()))
    with pytest.raises(shardwise.Error, match="other"):
        checkpoint.load(f"{folder}-other", model)


def fails_alone(rank: int, folder: str) -> None:
    model = shardwise.fully_shard(mlps(WIDTH, 2))
    checkpoint.save(folder, model, values={"step": 1})

    def refuses(match: str, **options: Any) -> None:
        with pytest.raises((shardwise.Error, ValueError), match=match):
            checkpoint.save(folder, model, **options)

    class Text:
        pass

    sparse = torch.eye(2).to_sparse()
    refuses("'program.sparse' cannot be part", tensors={"sparse": sparse} if rank == 1 else {})
    refuses("'program.object' cannot be part", tensors={"object": Text()} if rank == 1 else {})
    refuses("the value 'object' cannot be saved", values={"object": Text()})
    refuses("the value 'object' cannot be saved", values={"object": Text()} if rank == 1 else {})
    refuses("the value 'large' cannot be saved", values={"large": 2**64})
    refuses('rank 1 saves a checkpoint with the values {"step": 1} to .*, but rank 0', values={"step": rank})
    refuses("the name of a value 1 cannot be saved: it must be a text", values={1: 2} if rank == 1 else {})
    refuses(r"the name of a value '\\ud800' cannot be saved", values={"\ud800": 1})
    refuses(r"the value 'text', '\\ud800' cannot be saved", values={"text": ["\ud800"]} if rank == 1 else {"text": "a"})
    refuses("the name of a tensor 1 cannot be saved", tensors={1: torch.zeros(1)} if rank == 1 else {})
    refuses(r"the name of a tensor '\\ud800' cannot be saved", tensors={"\ud800": torch.zeros(1)})
    with pytest.raises((shardwise.Error, ValueError), match=r"the path '.*\\udcff' is not valid UTF-8"):
        checkpoint.save(f"{folder}\udcff", model)
    with pytest.raises(shardwise.Error, match=rf"rank 1 saves .* to {folder}-1, but rank 0 saves .* to {folder}-0"):
        checkpoint.save(f"{folder}-{rank}", model)
    with pytest.raises(shardwise.Error, match=f"rank 1 loads {folder}-1, but rank 0 loads {folder}-0"):
        checkpoint.load(f"{folder}-{rank}", model)
    refuses(r"'program.sizes' is F32 of \[1\] on rank 0, but F32 of \[2\]", tensors={"sizes": torch.zeros(rank + 1)})
    assert checkpoint.load(folder, model).values == {"step": 1}


def without_marker(rank: int, folder: str) -> None:
    model = shardwise.fully_shard(mlps(WIDTH, 2))
    checkpoint.save(folder, model)
    assert not checkpoint.load(folder, model, allow_unverified=False).unverified
    dist.barrier()
    if rank == 0:
        Path(folder, "shardwise.json").unlink()
    dist.barrier()
    with pytest.raises(shardwise.Error, match=r"its shardwise\.json is missing"):
        checkpoint.load(folder, model, strict=False)


def one_file(rank: int, name: str, folder: str) -> None:
    run = Run(name, rank).train(0, 2)
    file = f"{folder}/model.safetensors"
    if WORLDS[name] > 1:
        with pytest.raises(shardwise.Error, match=f"rank 1 writes {file}-1, but rank 0 writes"):
            checkpoint.export_safetensors(f"{file}-{rank}", run.model)
    checkpoint.export_safetensors(file, run.model)
    expected = whole_of(run.model)
    assert load_file(file).keys() == run.model.state_dict().keys()
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    other = Run(name, rank).spoil()
    assert checkpoint.load(folder, other.model).unverified
    assert_same(whole_of(other.model), expected)
    with pytest.raises(shardwise.Error, match=r"has no shardwise\.json: another program wrote it"):
        checkpoint.load(folder, other.model, allow_unverified=False)


def one_file_of_stages(rank: int, file: str) -> None:
    stage = nn.ModuleDict({str(rank): mlps(WIDTH, 2)[rank]})
    with pytest.raises(shardwise.Error, match="is not on each of the ranks"):
        checkpoint.export_safetensors(file, stage)
    assert not Path(file).exists()


def broken(rank: int, folder: str) -> None:
    model = shardwise.fully_shard(mlps(WIDTH, 2))
    checkpoint.save(folder, model)
    file = sorted(Path(folder).glob("*.safetensors"))[0]
    if rank == 0:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(shardwise.Error, match=file.name):
        checkpoint.load(folder, model)


def newest(rank: int, root: str) -> None:
    model = shardwise.fully_shard(mlps(WIDTH, 1))
    for step in (5, 10, 100):
        checkpoint.save(checkpoint.step_folder(root, step), model)
    assert checkpoint.newest_step(root) == checkpoint.SavedStep(100, f"{root}/step-100")
    dist.barrier()
    if rank == 0:
        assert checkpoint.keep_newest_steps(root, 2) == [f"{root}/step-5"]
        # A save that died before its end.
        Path(f"{root}/step-100/shardwise.json").unlink()
    dist.barrier()
    found = checkpoint.newest_step(root)
    assert found is not None and found.step == 10
    checkpoint.load(found.folder, model)


def plain_module(rank: int, folder: str) -> None:
    model, other = mlps(WIDTH, 2), spoil(mlps(WIDTH, 2))
    checkpoint.save(folder, model)
    checkpoint.load(folder, other)
    assert_same(whole_of(other), whole_of(model))


class TestSave:
    def test_any_division_loads_what_any_other_saved(self, tmp_path: Path) -> None:
        names = list(WORLDS)
        for number, name in enumerate(names):
            folder = str(tmp_path / str(number))
            run_ranks(WORLDS[name], saved, name, folder)
            for other in (names[(number + step) % len(names)] for step in by_form((1, 3), tuple(range(len(names))))):
                run_ranks(WORLDS[other], loaded, other, folder)

    test_a_resumed_run_goes_on_bit_for_bit = on_ranks(
        WORLDS, resumed, each=["plain", "rows of 3", "copies", "2 x 2 with tensor parallelism"], path="step"
    )
    test_dtypes_and_the_programs_tensors = on_ranks(2, dtypes, path="step")
    test_what_does_not_fit_is_told_before_anything_changes = on_ranks(2, does_not_fit, path="step")

    def test_a_rank_that_fails_fails_on_all_and_what_was_there_stays(self, tmp_path: Path) -> None:
        run_ranks(3, fails_alone, str(tmp_path / "step"))
        assert [path.name for path in tmp_path.iterdir()] == ["step"]

    test_a_broken_file_is_named_on_all_ranks = on_ranks(2, broken, path="step")
    test_one_that_lost_its_marker_is_refused = on_ranks(2, without_marker, path="step")

    @pytest.mark.parametrize("name", ["plain", "rows of 3", "2 copies of 2", "2 x 2 with tensor parallelism"])
    def test_one_file_of_safetensors(self, name: str, tmp_path: Path) -> None:
        run_ranks(WORLDS[name], one_file, name, str(tmp_path / "out"))
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]

    test_stages_are_not_one_file = on_ranks(2, one_file_of_stages, path="model.safetensors")
    test_the_newest_steps = on_ranks(2, newest, path="run")
    test_a_plain_module_of_several_ranks = on_ranks(2, plain_module, path="step")


def in_background(rank: int, folder: str) -> None:
    """What was there at each call is written while training goes on."""
    run = Run("rows of 2", rank)
    saver, expected = checkpoint.AsyncSaver(), []
    for step in range(3):
        run.train(step, step + 1)
        saver.save(checkpoint.step_folder(folder, step), run.model, run.optimizer, values={"step": step})
        expected.append(run.whole())
    run.train(3, 4)
    saver.wait()
    assert not saver.is_saving
    for step, whole in enumerate(expected):
        other = Run("rows of 2", rank, lr=0.5).spoil()
        assert checkpoint.load(checkpoint.step_folder(folder, step), other.model, other.optimizer).values == {
            "step": step
        }
        assert_same(other.whole(), whole)


def fails_in_background(rank: int, folder: str) -> None:
    model = shardwise.fully_shard(mlps(WIDTH, 1))
    saver = checkpoint.AsyncSaver()
    saver.save(f"{folder}/step", model)
    saver.wait()
    # Known at once, on all ranks.
    Path(f"{folder}/file").write_text("mine")
    with pytest.raises((shardwise.Error, ValueError), match="file"):
        saver.save(f"{folder}/file", model)
    with pytest.raises((shardwise.Error, ValueError), match="cannot be part"):
        saver.save(f"{folder}/step", model, tensors={"sparse": torch.eye(2).to_sparse()} if rank == 1 else {})
    saver.wait()
    saver.save(f"{folder}/step", model, values={"step": 2})
    # A program that ends without waiting loses nothing.
    del saver
    assert checkpoint.load(f"{folder}/step", model).values == {"step": 2}


UNSEEN = """
import resource, sys, torch
from shardwise import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
def main():
    saver = checkpoint.AsyncSaver()
    saver.save(sys.argv[1], torch.nn.Linear(100, 100))
    if sys.argv[2] == "held":
        sys.saver = saver
main()
"""


class TestAsyncSaver:
    @pytest.mark.parametrize("way", ["held", "dropped"])
    def test_a_failure_that_nobody_saw_ends_the_process_with_an_error(self, way: str, tmp_path: Path) -> None:
        done = python("-c", UNSEEN, tmp_path / "step", way)
        assert done.returncode == 1, done.stderr
        assert "the last save of an AsyncSaver failed" in done.stderr and "raise the limit (ulimit -f)" in done.stderr
        assert not list(tmp_path.iterdir())

    test_what_was_there_at_the_call_is_written = on_ranks(2, in_background, path="run")

    test_errors = on_ranks(2, fails_in_background, path=".")
