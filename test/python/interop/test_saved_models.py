"""Checkpoints of models and optimizers of all kinds; torch and C++ programs read ours, and ours reads theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bound import models as bound_models
from bound import stack_loss, twin
from engine import TORCH
from models import batch
from pool import on_ranks, run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_runs import OF_SAFETENSORS, WIDTH, Run, assert_same, assert_same_bytes, make, spoil, whole_of, wrap_each
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from training_models import mlps

import shardwise
from shardwise import checkpoint


def from_meta(rank: int, folder: str) -> None:
    """A model that was never anywhere but on the meta device before it is loaded."""
    run = Run("rows of 2", rank).train(0, 2)
    checkpoint.save(folder, run.model, run.optimizer)
    with torch.device("meta"):
        model = make()
    wrap_each(model, shardwise.fully_shard)
    with pytest.raises(ValueError, match="it has no values: call module.to_empty"):
        checkpoint.load(folder, model)
    model.to_empty(device="cpu")
    checkpoint.load(folder, model, strict=True)
    assert_same(whole_of(model), whole_of(run.model))


class Tied(nn.Module):
    """As language models are: a head that is the embedding, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("angles", torch.arange(WIDTH, dtype=torch.float), persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(numbers)) * self.angles)


def from_hugging_face(rank: int, folder: str) -> None:
    """On the meta device, and then each rank its part of a folder in which a tied weight has one name of two."""
    torch.manual_seed(0)
    plain = Tied()
    if rank == 0:
        tensors = {name: value.detach() for name, value in plain.named_parameters()}
        places = {name: f"model-0000{1 + (name == 'layer.bias')}-of-00002.safetensors" for name in tensors}
        for file in set(places.values()):
            save_file({name: tensors[name] for name in tensors if places[name] == file}, Path(folder, file))
        Path(folder, "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    dist.barrier()
    with torch.device("meta"):
        model = Tied()
    shardwise.fully_shard(model.layer)
    shardwise.fully_shard(model)
    model.to_empty(device="cpu")
    assert checkpoint.load(folder, model).unverified
    model.angles.copy_(torch.arange(WIDTH))
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(torch.arange(11)), plain(torch.arange(11)))


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
        assert one.keys() == two.keys()
        for key in one.keys() - {"params"}:
            assert type(one[key]) is type(two[key]) and one[key] == two[key], key
    assert all(again.state[parameter]["count"] == 2 for parameter in other.parameters())


def stages(rank: int, folder: str) -> None:
    """Each rank has another part of the model, with an optimizer of its own."""

    def make_stage() -> tuple[nn.Module, torch.optim.Optimizer]:
        stage = nn.ModuleDict({str(rank): mlps(WIDTH, 2)[rank]})
        return stage, torch.optim.SGD(stage.parameters(), lr=0.1 + rank, momentum=0.9)

    stage, optimizer = make_stage()
    for _ in range(2):
        stage[str(rank)](batch(0, rank, WIDTH)).sum().backward()  # type: ignore[index]
        optimizer.step()
    checkpoint.save(folder, stage, optimizer)
    other, again = make_stage()
    found = checkpoint.load(folder, other, again)
    assert (found.missing, found.unexpected) == ([], [])
    assert_same(whole_of(other, again), whole_of(stage, optimizer))


def stages_of_one_name(rank: int, folder: str) -> None:
    stage = nn.Sequential(mlps(WIDTH, 2)[rank])
    text = "'0.in_proj.weight' has other values on rank 1 than on rank 0"
    with pytest.raises(shardwise.Error, match=text):
        checkpoint.save(folder, stage)
    model = shardwise.fully_shard(mlps(WIDTH, 1))
    with pytest.raises(shardwise.Error, match="'program.seed' has other values on rank 1"):
        checkpoint.save(folder, model, tensors={"seed": torch.tensor([rank])})
    assert not list(Path(folder).parent.iterdir())


class TestSavedModels:
    def test_ranks_without_a_process_group(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each would write over what the others wrote."""
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="the program has 2 ranks"):
            checkpoint.save(tmp_path / "step", nn.Linear(2, 2))
        with pytest.raises(ValueError, match="the program has 2 ranks"):
            checkpoint.AsyncSaver().save(tmp_path / "step", nn.Linear(2, 2))
        assert not list(tmp_path.iterdir())

    def test_stages_of_a_pipeline(self, tmp_path: Path) -> None:
        run_ranks(2, stages, str(tmp_path / "step"))
        # Together they are the model.
        model = mlps(WIDTH, 2)
        assert checkpoint.load(tmp_path / "step", model).unexpected == []

    test_different_tensors_of_one_name_are_refused = on_ranks(2, stages_of_one_name, path="step")
    test_made_on_meta = on_ranks(2, from_meta, path="step")

    test_made_on_meta_from_hugging_face = on_ranks(2, from_hugging_face, path=".")
    test_offload_and_wrappers = on_ranks(2, with_offload_and_wrappers, path="step")
    test_groups_and_options = on_ranks(2, groups_and_options, path="step")

    def test_extra_state_is_refused(self, tmp_path: Path) -> None:
        class Extra(nn.Linear):
            def get_extra_state(self) -> Any:
                return {"a": 1}

        with pytest.raises(ValueError, match="'0._extra_state' cannot be part of a checkpoint"):
            checkpoint.save(tmp_path / "step", nn.Sequential(Extra(2, 2)))

    def test_compiled_modules_have_the_names_of_others(self, tmp_path: Path) -> None:
        model, other = mlps(WIDTH, 2), spoil(mlps(WIDTH, 2))
        model[1] = torch.compile(model[1])  # type: ignore[assignment]
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


def of_each_dtype(value: int) -> nn.Module:
    """Buffers of all dtypes, and some of odd names and sizes."""
    module = nn.Module()
    for dtype in OF_SAFETENSORS:
        module.register_buffer(f"of {dtype}".replace(".", " "), torch.full((3, 2), value).to(dtype))
    module.register_buffer("pairs", torch.full((3, 2), 90 * value, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    for name, shape in (('odd "näme"\n', (4,)), ("none", (0, 3)), ("scalar", ())):
        module.register_buffer(name, torch.full(shape, value))
    return module


def assert_same_buffers(found: dict[str, torch.Tensor], expected: nn.Module) -> None:
    buffers = dict(expected.named_buffers())
    assert found.keys() == buffers.keys()
    for name, tensor in buffers.items():
        assert_same_bytes(found[name], tensor, name)


def columns(parameter: torch.Tensor) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


def torch_writes(rank: int, folder: str, consolidated: bool) -> None:
    """Two ranks of torch's own engine."""
    model = mlps(WIDTH, 2)
    wrap_each(model, TORCH.fully_shard, shard_placement_fn=columns)
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=consolidated)
    dcp.save(model.state_dict(), storage_writer=writer)


def ours_reads(rank: int, folder: str) -> None:
    model = mlps(WIDTH, 2)
    expected = whole_of(model)
    wrap_each(spoil(model), shardwise.fully_shard)
    assert checkpoint.load(folder, model).values == {}
    assert_same(whole_of(model), expected)


def ours_writes(rank: int, folder: str) -> None:
    model = mlps(WIDTH, 2)
    wrap_each(model, shardwise.fully_shard)
    checkpoint.save(folder, model, torch.optim.AdamW(model.parameters()))


def torch_reads(rank: int, folder: str) -> None:
    model = mlps(WIDTH, 2)
    expected = whole_of(model)
    wrap_each(model, TORCH.fully_shard, shard_placement_fn=columns)
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

    def test_the_safetensors_library(self, tmp_path: Path) -> None:
        model, other = of_each_dtype(1), of_each_dtype(0)
        saver = checkpoint.AsyncSaver()
        saver.save(tmp_path / "step", model)
        saver.wait()
        checkpoint.export_safetensors(tmp_path / "out" / "model.safetensors", model)
        (file,) = (tmp_path / "step").glob("*.safetensors")
        assert_same_buffers(load_file(file), model)
        with safe_open(file, framework="pt") as opened:
            assert set(opened.metadata()) == {"format", "DCP_VERSION", "DCP_SHARDING_INFO", "WRITTEN_BY"}
            assert opened.metadata()["format"] == "pt" and opened.metadata()["DCP_VERSION"] == "1.0"
        (tmp_path / "theirs").mkdir()
        save_file(dict(model.named_buffers()), tmp_path / "theirs" / "model.safetensors")
        for folder in ("step", "theirs", "out"):
            checkpoint.load(tmp_path / folder, other)
            assert_same_buffers(dict(other.named_buffers()), model)


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
