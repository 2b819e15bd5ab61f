"""Files of torch.save(): both languages read what Python wrote, each rank its part, and nothing is unpickled."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bound import models as bound_models
from bound import twin
from pool import on_ranks, run_ranks
from safetensors.torch import load_file
from saved_runs import OF_SAFETENSORS, WIDTH, assert_same, assert_same_bytes, spoil, whole_of, wrap_each
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from training_models import mlps

import shardwise
from shardwise import _C, checkpoint

DTYPES = (*OF_SAFETENSORS, torch.complex128)


def of_all_kinds() -> dict[str, torch.Tensor]:
    """Tensors of all dtypes, that share memory, that are views of some of it, and without elements."""
    some = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    kinds = {f"of {dtype}": (100 * some).abs().clamp(1, 90).to(dtype) for dtype in DTYPES}
    kinds |= {"whole": some, "tied": some, "rows": some[2:5], "columns": some[:, 1:4], "transposed": some.t()}
    kinds |= {"steps": some[::2, 1::3], "permuted": some.view(3, 2, 8).permute(2, 0, 1), "scalar": some[3, 4]}
    return kinds | {"none": torch.empty(0, 3), "none of columns": some[:, :0], "parameter": nn.Parameter(some[0])}


def loads_a_file(rank: int, file: str) -> None:
    expected = torch.load(file)
    model = spoil(mlps(WIDTH, 3, nn.Embedding(11, WIDTH), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)))
    wrap_each(model, shardwise.fully_shard)
    found = checkpoint.load(file, model)
    assert found.unverified and (found.missing, found.unexpected, found.values) == ([], [], {})
    assert_same(whole_of(model), expected)


def loads_a_folder(rank: int, folder: str, whole: str) -> None:
    model = spoil(mlps(WIDTH, 3, nn.Embedding(11, WIDTH)))
    wrap_each(model, shardwise.fully_shard)
    assert checkpoint.load(folder, model).unverified
    assert_same(whole_of(model), torch.load(whole))


def bytes_read() -> int:
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:"))
    return int(line.split()[1])


def reads_its_rows(rank: int, file: str) -> None:
    model = shardwise.fully_shard(nn.Linear(1024, 8192, bias=False))
    before = bytes_read()
    checkpoint.load(file, model)
    # Blocks of 4 MiB, of which one may be another rank's in part.
    assert bytes_read() - before < 0.7 * Path(file).stat().st_size
    assert_same(whole_of(model), torch.load(file))


def of_dtensors(rank: int, file: str) -> None:
    mesh = init_device_mesh("cpu", (1,))
    torch.save({"weight": DTensor.from_local(torch.ones(2), mesh, [Shard(0)])}, file)
    with pytest.raises(shardwise.Error, match=r"its 'weight' is made by 'torch\._[^']*' in Python, not a plain tensor"):
        checkpoint.load(file, nn.Linear(1, 2, bias=False))


class TestTorchFile:
    def test_tensors_of_all_kinds(self, tmp_path: Path) -> None:
        kinds = of_all_kinds()
        for protocol in (2, 3, 4, 5):
            torch.save(kinds, tmp_path / "m.pt", pickle_protocol=protocol)
            saved = _C.SavedFolder(str(tmp_path / "m.pt"))
            assert saved.tensors.keys() == kinds.keys()
            for name, tensor in kinds.items():
                assert_same_bytes(saved.read_whole(name), tensor, name)
        torch.save({"x": torch.zeros(1).expand(5)}, tmp_path / "m.pt")
        with pytest.raises(shardwise.Error, match="'x', as of an expanded tensor, share memory"):
            _C.SavedFolder(str(tmp_path / "m.pt"))

    def test_folders_of_transformers(self, tmp_path: Path) -> None:
        """As its older versions wrote them: one file, or several and an index."""
        state = mlps(WIDTH, 3, nn.Embedding(11, WIDTH)).state_dict()
        folder, whole = tmp_path / "folder", str(tmp_path / "folder" / "pytorch_model.bin")
        folder.mkdir()
        torch.save(state, whole)
        run_ranks(2, loads_a_folder, str(folder), whole)
        whole = str(Path(whole).rename(tmp_path / "whole.bin"))
        places = {name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, name in enumerate(state)}
        for file in set(places.values()):
            mine = {name: tensor for name, tensor in state.items() if places[name] == file}
            torch.save(mine | {"of another model": torch.ones(2)}, folder / file)
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        run_ranks(2, loads_a_folder, str(folder), whole)
        index.write_text(json.dumps({"weight_map": places | {"of none": "pytorch_model-00001-of-00002.bin"}}))
        with pytest.raises(shardwise.Error, match="names 'of none', which pytorch_model-00001-of-00002.bin does not"):
            _C.SavedFolder(str(folder))
        index.write_text(json.dumps({"weight_map": {"a": "../m.bin"}}))
        with pytest.raises(shardwise.Error, match=r"'a' is in '\.\./m\.bin'; it must be .* ends in \.bin"):
            _C.SavedFolder(str(folder))

    def test_a_sharded_model_loads_one(self, tmp_path: Path) -> None:
        model = mlps(WIDTH, 3, nn.Embedding(11, WIDTH), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH))
        torch.save(model.state_dict(), tmp_path / "m.pt")
        run_ranks(3, loads_a_file, str(tmp_path / "m.pt"))

    def test_each_rank_reads_its_rows(self, tmp_path: Path) -> None:
        torch.save(nn.Linear(1024, 8192, bias=False).state_dict(), tmp_path / "m.pt")
        run_ranks(2, reads_its_rows, str(tmp_path / "m.pt"))

    def test_a_cpp_model_loads_one(self, tmp_path: Path) -> None:
        model, _ = twin("Stack", 6, 2)
        _, other = twin("Stack", 6, 2)
        with torch.no_grad():
            for value in other.parameters():
                value.normal_()
        torch.save({"model": other.state_dict(), "step": 5, "lr": 0.5, "name": "é"}, tmp_path / "m.pt")
        values = bound_models().load(str(tmp_path / "m.pt"), model.cpp_module, "model")
        assert values == {"step": 5, "lr": 0.5, "name": "é"}
        for (name, value), expected in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(value, expected), name

    def test_an_entry_and_what_lies_beside(self, tmp_path: Path) -> None:
        model, other = mlps(WIDTH, 1), mlps(WIDTH, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        arguments = argparse.Namespace(lr=0.1, names={"a", "b"}, data=b"bytes")
        everything = {
            "state": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "arguments": arguments,
            "epoch": 3,
        }
        torch.save(everything, tmp_path / "m.pt")
        assert checkpoint.load(tmp_path / "m.pt", other, entry="state").values == {"epoch": 3}
        assert_same(whole_of(other), whole_of(model))
        with pytest.raises(shardwise.Error, match=r"in its entries 'state', 'optimizer'\. Name the one"):
            checkpoint.load(tmp_path / "m.pt", other)
        with pytest.raises(shardwise.Error, match="has no entry 'model' that is a dictionary"):
            checkpoint.load(tmp_path / "m.pt", other, entry="model")
        checkpoint.save(tmp_path / "step", model)
        with pytest.raises(ValueError, match="only a file of torch.save"):
            checkpoint.load(tmp_path / "step", other, entry="model")

    def test_one_file_of_safetensors(self, tmp_path: Path) -> None:
        model, other = mlps(WIDTH, 1), mlps(WIDTH, 1)
        checkpoint.export_safetensors(tmp_path / "any.name", model)
        assert checkpoint.load(tmp_path / "any.name", other).unverified
        assert_same(whole_of(other), whole_of(model))
        checkpoint.save(tmp_path / "step", model)
        (part,) = (tmp_path / "step").glob("*.safetensors")
        with pytest.raises(shardwise.Error, match="is one of the files of a checkpoint. Load the folder .*/step"):
            checkpoint.load(part, other)

    def test_it_becomes_safetensors(self, tmp_path: Path) -> None:
        kinds = {name: value for name, value in of_all_kinds().items() if value.dtype != torch.complex128}
        torch.save(kinds, tmp_path / "m.pt")
        _C.merge_checkpoint(str(tmp_path / "m.pt"), str(tmp_path / "new"), 10**9)
        found = load_file(tmp_path / "new" / "model.safetensors")
        for name, tensor in kinds.items():
            assert_same_bytes(found[name], tensor, name)

    def test_what_is_no_state_dict_is_refused_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, file = nn.Linear(2, 3), tmp_path / "m.pt"

        def refused(saved: Any, match: str, **options: Any) -> None:
            torch.save(saved, file, **options)
            with pytest.raises(shardwise.Error, match=match):
                checkpoint.load(file, model)

        refused(model, r"it is made by 'torch\.nn\.modules\.linear\.Linear' in Python, not a state dict")
        refused(
            {"weight": torch.eye(3).to_sparse()}, r"its 'weight' is made by 'torch\._utils\._rebuild_sparse_tensor'"
        )
        refused({"weight": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, "_rebuild_qtensor")
        refused(
            {"weight": torch.ones(3, dtype=torch.complex64).conj()}, "its 'weight' is made by .* not a plain tensor"
        )
        refused(model.state_dict(), "before torch 1.6", _use_new_zipfile_serialization=False)
        folder = tmp_path / "folder"
        folder.mkdir()
        file.rename(folder / "pytorch_model.bin")
        with pytest.raises(shardwise.Error, match=r"pytorch_model\.bin is in the format that .* before torch 1\.6"):
            checkpoint.load(folder, model)
        torch.jit.save(torch.jit.script(model), file)
        with pytest.raises(shardwise.Error, match=r"it is of torch\.jit\.save\(\), or of torch::save\(\) in C\+\+"):
            checkpoint.load(file, model)
        monkeypatch.setattr(sys, "byteorder", "big")
        refused(model.state_dict(), "its byte order is 'big'")

    test_dtensors_are_refused_by_name = on_ranks(1, of_dtensors, path="m.pt")
