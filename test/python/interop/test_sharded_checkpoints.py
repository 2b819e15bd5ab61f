"""shardwise.checkpoint: what any ranks saved, any others load; and what goes wrong is told before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bound import models as bound_models
from bound import stack_loss, tokens, twin
from engine import TORCH
from form import by_form
from layouts import grid
from meshes import shared_mesh
from models import batch, local
from pool import run_ranks
from tensor_parallel import parallelize
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from training_models import mlps

import shardwise
from shardwise import checkpoint

WIDTH = 5


def wrap_each(model: nn.Module, wrap: Callable[..., Any], **options: Any) -> None:
    for module in model.modules():
        if module is not model and hasattr(module, "in_proj"):
            wrap(module, **options)
    wrap(model, **options)


def tensor_parallel(model: Any) -> None:
    mesh = shared_mesh((dist.get_world_size() // 2, 2), ("data", "tensor"))
    parallelize(model[2:], mesh["tensor"])
    wrap_each(model, shardwise.fully_shard, mesh=mesh["data"])


@dataclass(frozen=True)
class Division:
    """How a model is divided among the ranks of a world."""

    name: str
    world: int
    wrap: Callable[[Any], Any]
    #: Ranks that see the same data.
    alike: int = 1


DIVISIONS = {
    division.name: division
    for division in (
        Division("plain", 1, lambda model: model),
        Division("rows of 2", 2, lambda model: wrap_each(model, shardwise.fully_shard)),
        Division("rows of 3", 3, lambda model: wrap_each(model, shardwise.fully_shard)),
        Division("one unit of 4", 4, shardwise.fully_shard),
        Division("2 copies of 2", 4, lambda model: wrap_each(model, shardwise.fully_shard, mesh=grid())),
        Division("copies", 2, shardwise.replicate),
        Division("2 x 2 with tensor parallelism", 4, tensor_parallel, alike=2),
        Division("8", 8, lambda model: wrap_each(model, shardwise.fully_shard)),
    )
}


def make() -> Any:
    """With a buffer of whole numbers, and a parameter that is not trained."""
    model = mlps(WIDTH, 3, nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH))
    model.register_buffer("count", torch.arange(5))
    model[0].weight.requires_grad_(False)
    return model


class Run:
    """A model on its ranks, with an optimizer."""

    def __init__(self, division: Division, rank: int, lr: float = 0.02) -> None:
        self.model, self.data = make(), rank // division.alike
        division.wrap(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.1)

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            self.optimizer.zero_grad()
            numbers = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + self.data))
            self.model(numbers).pow(2).mean().backward()
            self.optimizer.step()
        return self

    def spoil(self) -> Run:
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.fill_(1)
        return self

    def whole(self) -> dict[str, Any]:
        return whole_of(self.model, self.optimizer)


def whole_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    found: dict[str, Any] = dict(model.state_dict())
    if optimizer is not None:
        state = optimizer.state_dict()
        for key, values in state["state"].items():
            found |= {f"{key}.{name}": value for name, value in values.items()}
        found["groups"] = state["param_groups"]
    return {
        name: value.full_tensor().clone()
        if isinstance(value, DTensor)
        else value.clone()
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for name, value in found.items()
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def saved(rank: int, name: str, folder: str) -> None:
    run = Run(DIVISIONS[name], rank).train(0, 3)
    checkpoint.save(folder, run.model, run.optimizer, values={"step": 3, "losses": [0.5, float("inf")]})
    whole = run.whole()
    if rank == 0:
        torch.save(whole, f"{folder}.pt")


def loaded(rank: int, name: str, folder: str) -> None:
    expected = torch.load(f"{folder}.pt")
    run = Run(DIVISIONS[name], rank, lr=0.5).spoil()
    found = checkpoint.load(folder, run.model, run.optimizer)
    assert found.values == {"step": 3, "losses": [0.5, float("inf")]}
    assert (found.missing, found.unexpected, found.tensors) == ([], [], {})
    assert_same(run.whole(), expected)
    run.train(3, 4)


def resumed(rank: int, name: str, folder: str) -> None:
    straight = Run(DIVISIONS[name], rank).train(0, 3)
    checkpoint.save(folder, straight.model, straight.optimizer)
    # What kept full copies, or state from before, would leave behind.
    again = Run(DIVISIONS[name], rank, lr=0.5).train(7, 9)
    parameters = list(again.model.parameters())
    checkpoint.load(folder, again.model, again.optimizer)
    assert all(one is other for one, other in zip(parameters, again.model.parameters(), strict=True))
    assert_same(again.train(3, 6).whole(), straight.train(3, 6).whole())


def kept_copies(rank: int, folder: str) -> None:
    """Full parameters that stay between forwards are those of the checkpoint afterwards, not those from before."""
    runs = []
    for _ in range(2):
        run = Run(Division("kept", 2, lambda model: shardwise.fully_shard(model, reshard_after_forward=False)), rank)
        run.train(0, 1)
        runs.append(run)
    first, second = runs
    first.train(1, 3)
    checkpoint.save(folder, first.model, first.optimizer)
    with torch.no_grad():
        second.model(tokens(5, rank))
    checkpoint.load(folder, second.model, second.optimizer)
    with torch.no_grad():
        assert torch.equal(second.model(tokens(6, rank)), first.model(tokens(6, rank)))


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
        with torch.no_grad():
            for value in other.state_dict().values():
                value.zero_()
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
    refuses("the value 'large' cannot be saved", values={"large": 2**64})
    refuses('rank 1 saves a checkpoint with the values {"step": 1}, but rank 0', values={"step": rank})
    refuses(r"'program.sizes' is F32 of \[1\] on rank 0, but F32 of \[2\]", tensors={"sizes": torch.zeros(rank + 1)})
    assert checkpoint.load(folder, model).values == {"step": 1}


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
    model, other = mlps(WIDTH, 2), mlps(WIDTH, 2)
    checkpoint.save(folder, model)
    with torch.no_grad():
        for value in other.state_dict().values():
            value.zero_()
    checkpoint.load(folder, other)
    assert_same(whole_of(other), whole_of(model))


class TestSave:
    def test_any_division_loads_what_any_other_saved(self, tmp_path: Path) -> None:
        names = list(DIVISIONS)
        for number, name in enumerate(names):
            folder = str(tmp_path / str(number))
            run_ranks(DIVISIONS[name].world, saved, name, folder)
            for other in (names[(number + step) % len(names)] for step in by_form((1, 3), tuple(range(len(names))))):
                run_ranks(DIVISIONS[other].world, loaded, other, folder)

    @pytest.mark.parametrize("name", [name for name in DIVISIONS if name != "8"])
    def test_a_resumed_run_goes_on_bit_for_bit(self, name: str, tmp_path: Path) -> None:
        run_ranks(DIVISIONS[name].world, resumed, name, str(tmp_path / "step"))

    def test_dtypes_and_the_programs_tensors(self, tmp_path: Path) -> None:
        run_ranks(2, dtypes, str(tmp_path / "step"))

    def test_what_does_not_fit_is_told_before_anything_changes(self, tmp_path: Path) -> None:
        run_ranks(2, does_not_fit, str(tmp_path / "step"))

    def test_a_rank_that_fails_fails_on_all_and_what_was_there_stays(self, tmp_path: Path) -> None:
        run_ranks(3, fails_alone, str(tmp_path / "step"))
        assert [path.name for path in tmp_path.iterdir()] == ["step"]

    def test_a_broken_file_is_named_on_all_ranks(self, tmp_path: Path) -> None:
        run_ranks(2, broken, str(tmp_path / "step"))

    def test_the_newest_steps(self, tmp_path: Path) -> None:
        run_ranks(2, newest, str(tmp_path / "run"))

    def test_a_plain_module_of_several_ranks(self, tmp_path: Path) -> None:
        run_ranks(2, plain_module, str(tmp_path / "step"))

    def test_full_copies_that_are_kept(self, tmp_path: Path) -> None:
        run_ranks(2, kept_copies, str(tmp_path / "step"))


def from_meta(rank: int, folder: str) -> None:
    """A model that was never anywhere but on the meta device before it is loaded."""
    run = Run(DIVISIONS["rows of 2"], rank).train(0, 2)
    checkpoint.save(folder, run.model, run.optimizer)
    with torch.device("meta"):
        model: Any = mlps(WIDTH, 3, nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH))
        model.register_buffer("count", torch.empty(5, dtype=torch.long))
    wrap_each(model, shardwise.fully_shard)
    with pytest.raises(ValueError, match="it has no values: call module.to_empty"):
        checkpoint.load(folder, model)
    model.to_empty(device="cpu")
    checkpoint.load(folder, model, strict=True)
    assert_same(whole_of(model), whole_of(run.model))


def with_offload_and_wrappers(rank: int, folder: str) -> None:
    """Names are those without torch's wrappers, and what is kept on the host is loaded there."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model: Any = mlps(WIDTH, 2)
    model[0] = checkpoint_wrapper(model[0])
    shardwise.fully_shard(model[0], offload_policy=CPUOffloadPolicy())
    shardwise.fully_shard(model, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(batch(0, rank, WIDTH)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    plain: Any = mlps(WIDTH, 2)
    other = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    checkpoint.load(folder, plain, other)
    for (name, value), expected in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(value, expected.full_tensor()), name
        momentum = optimizer.state[expected]["momentum_buffer"].full_tensor()
        assert torch.equal(other.state[value]["momentum_buffer"], momentum), name
    assert other.param_groups[0]["lr"] == 0.1


def groups_and_options(rank: int, folder: str) -> None:
    """Groups, options of every kind, a scheduler's besides, and numbers in the state."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
            super().step()

    def make_one(lr: float, name: str) -> tuple[Any, Any]:
        model: Any = mlps(WIDTH, 2)
        wrap_each(model, shardwise.fully_shard)
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": lr, "name": name}, {"params": others, "nesterov": True, "momentum": 0.9}]
        return model, Counting(groups, lr=2 * lr, maximize=True)

    model, optimizer = make_one(0.1, "first")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(2):
        model(batch(step, rank, WIDTH)).sum().backward()
        optimizer.step()
        scheduler.step()
    checkpoint.save(folder, model, optimizer)
    other, again = make_one(0.7, "other")
    checkpoint.load(folder, other, again)
    for one, two in zip(optimizer.param_groups, again.param_groups, strict=True):
        assert {key: value for key, value in one.items() if key != "params"} == {
            key: value for key, value in two.items() if key != "params"
        }
        assert [type(value) for key, value in sorted(one.items())] == [
            type(value) for key, value in sorted(two.items())
        ]
    assert all(again.state[parameter]["count"] == 2 for parameter in other.parameters())


def in_background(rank: int, folder: str) -> None:
    """What was there at each call is written while training goes on."""
    run = Run(DIVISIONS["rows of 2"], rank)
    saver, expected = checkpoint.Saver(), []
    for step in range(3):
        run.train(step, step + 1)
        saver.save(checkpoint.step_folder(folder, step), run.model, run.optimizer, values={"step": step})
        expected.append(run.whole())
    run.train(3, 4)
    saver.wait()
    assert not saver.is_saving
    for step, whole in enumerate(expected):
        other = Run(DIVISIONS["rows of 2"], rank, lr=0.5).spoil()
        assert checkpoint.load(checkpoint.step_folder(folder, step), other.model, other.optimizer).values == {
            "step": step
        }
        assert_same(other.whole(), whole)


def fails_in_background(rank: int, folder: str) -> None:
    model = shardwise.fully_shard(mlps(WIDTH, 1))
    saver = checkpoint.Saver()
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


class TestSaver:
    def test_what_was_there_at_the_call_is_written(self, tmp_path: Path) -> None:
        run_ranks(2, in_background, str(tmp_path / "run"))

    def test_errors(self, tmp_path: Path) -> None:
        run_ranks(2, fails_in_background, str(tmp_path))


class TestSavedModels:
    def test_made_on_meta(self, tmp_path: Path) -> None:
        run_ranks(2, from_meta, str(tmp_path / "step"))

    def test_offload_and_wrappers(self, tmp_path: Path) -> None:
        run_ranks(2, with_offload_and_wrappers, str(tmp_path / "step"))

    def test_groups_and_options(self, tmp_path: Path) -> None:
        run_ranks(2, groups_and_options, str(tmp_path / "step"))

    def test_extra_state_is_refused(self, tmp_path: Path) -> None:
        class Extra(nn.Linear):
            def get_extra_state(self) -> Any:
                return {"a": 1}

        with pytest.raises(ValueError, match="'0._extra_state' cannot be part of a checkpoint"):
            checkpoint.save(tmp_path / "step", nn.Sequential(Extra(2, 2)))

    def test_compiled_modules_have_the_names_of_others(self, tmp_path: Path) -> None:
        model, other = mlps(WIDTH, 2), mlps(WIDTH, 2)
        model[1] = torch.compile(model[1])  # type: ignore[assignment]
        with torch.no_grad():
            for value in other.state_dict().values():
                value.zero_()
        checkpoint.save(tmp_path / "step", torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.1))
        checkpoint.load(tmp_path / "step", other, torch.optim.SGD(other.parameters(), lr=0.2))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)

    def test_tied_parameters(self, tmp_path: Path) -> None:
        def tied() -> Any:
            model = mlps(WIDTH, 2)
            model[1].in_proj.weight = model[0].in_proj.weight
            return model

        model, other = tied(), tied()
        adam = torch.optim.Adam(model.parameters())
        model(batch(0, 0, WIDTH)).sum().backward()
        adam.step()
        checkpoint.save(tmp_path / "step", model, adam)
        checkpoint.load(tmp_path / "step", other, torch.optim.Adam(other.parameters(), lr=0.5))
        assert other[1].in_proj.weight is other[0].in_proj.weight
        assert_same(whole_of(other), whole_of(model))

    def test_optimizers_that_cannot_be_saved(self, tmp_path: Path) -> None:
        model = mlps(WIDTH, 1)
        optimizer = torch.optim.LBFGS(model.parameters())

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(batch(0, 0, WIDTH)).sum()
            value.backward()
            return value

        optimizer.step(loss)
        with pytest.raises(ValueError, match=r"optimizer\.state\.0\.in_proj\.weight\..* may be tensors, numbers"):
            checkpoint.save(tmp_path / "step", model, optimizer)
        assert not list(tmp_path.iterdir())


def torch_writes(rank: int, folder: str, consolidated: bool) -> None:
    """Two ranks of torch's own engine."""
    model = mlps(WIDTH, 2)
    wrap_each(model, TORCH.fully_shard)
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=consolidated)
    dcp.save(model.state_dict(), storage_writer=writer)


def ours_reads(rank: int, folder: str) -> None:
    model = mlps(WIDTH, 2)
    expected = whole_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    wrap_each(model, shardwise.fully_shard)
    assert checkpoint.load(folder, model).values == {}
    assert_same(whole_of(model), expected)


def ours_writes(rank: int, folder: str) -> None:
    model = mlps(WIDTH, 2)
    wrap_each(model, shardwise.fully_shard)
    checkpoint.save(folder, model, torch.optim.AdamW(model.parameters()))


def torch_reads(rank: int, folder: str) -> None:
    model = mlps(WIDTH, 2)
    expected = whole_of(model)
    wrap_each(model, TORCH.fully_shard)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    assert_same({name: value.full_tensor() for name, value in state.items()}, expected)


class TestInterchange:
    @pytest.mark.parametrize("consolidated", [False, True])
    def test_ours_reads_torchs(self, consolidated: bool, tmp_path: Path) -> None:
        run_ranks(2, torch_writes, str(tmp_path / "step"), consolidated)
        run_ranks(3, ours_reads, str(tmp_path / "step"))

    def test_torch_reads_ours(self, tmp_path: Path) -> None:
        run_ranks(3, ours_writes, str(tmp_path / "step"))
        run_ranks(2, torch_reads, str(tmp_path / "step"))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_cpp_and_python_read_each_others(name: str, tmp_path: Path) -> None:
    options = {"AdamW": {"weight_decay": 0.1}, "SGD": {"momentum": 0.9}}[name]
    tensors = {key: torch.tensor(value, dtype=torch.double) for key, value in {"lr": 0.02, **options}.items()}
    model, plain = twin("Stack", 6, 2)
    mine = bound_models().Optimizer(name, list(model.parameters()), tensors)
    theirs: Any = getattr(torch.optim, name)(plain.parameters(), lr=0.7, fused=True, **options)

    def train(module: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            module.zero_grad()
            stack_loss(module, step, 0).backward()
            optimizer.step()

    train(model, mine, 0, 3)
    mine.save(str(tmp_path / "cpp"), model.cpp_module, {"step": 3})
    assert checkpoint.load(tmp_path / "cpp", plain, theirs).values == {"step": 3}
    assert theirs.param_groups[0]["lr"] == 0.02
    train(plain, theirs, 3, 5)
    checkpoint.save(tmp_path / "python", plain, theirs, values={"step": 5, "losses": [1.0]})
    again, _ = twin("Stack", 6, 2)
    other = bound_models().Optimizer(name, list(again.parameters()), tensors)
    assert other.load(str(tmp_path / "python"), again.cpp_module) == {"step": 5}
    train(again, other, 5, 6)
    train(plain, theirs, 5, 6)
    train(model, mine, 3, 6)
    for (key, value), (_, one), (_, two) in zip(
        plain.named_parameters(), again.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one, value, msg=key)
        torch.testing.assert_close(two, value, msg=key)
