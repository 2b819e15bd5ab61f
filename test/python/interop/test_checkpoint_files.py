"""Files of checkpoints: the safetensors library and torch's DCP read ours, and ours reads what they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bound import models
from pool import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

#: Those that both safetensors and torch's copies and comparisons know.
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip


def files() -> Any:
    return models().files


def of_each_dtype() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    made = {str(dtype): torch.randint(0, 2, (3, 2), generator=generator).to(dtype) for dtype in DTYPES}
    pairs = torch.randint(0, 256, (3, 2), generator=generator, dtype=torch.uint8)
    return made | {"pairs": pairs.view(torch.float4_e2m1fn_x2)}


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "0.weight": torch.randn(7, 5, generator=generator),
        "0.bias": torch.randn(7, generator=generator).bfloat16(),
        "1.weight": torch.randn(3, 8, generator=generator).double(),
        "step": torch.tensor(12),
        "scale": torch.tensor([0.5]),
        "flags": torch.tensor([True, False, True, True, False]),
        'odd "näme".\n': torch.arange(4),
        "none": torch.empty(0, 3),
    }


def shards_of(tensors: dict[str, torch.Tensor], ranks: int) -> list[list[Any]]:
    """Pieces of rows, as ranks hold them; what cannot be cut, and a row without elements, is the first rank's."""
    result: list[list[Any]] = [[] for _ in range(ranks)]
    for name, tensor in tensors.items():
        pieces = tensor.tensor_split(ranks) if tensor.numel() > 1 else (tensor,)
        row = 0
        for rank, piece in enumerate(pieces):
            offsets = [row] + [0] * (tensor.dim() - 1) if tensor.dim() else []
            if piece.numel() or rank == 0:
                result[rank].append((name, piece.contiguous(), offsets))
            row += len(piece) if tensor.dim() else 0
    return result


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        # Not all dtypes can be compared, but bytes can.
        mine, theirs = (each.reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(mine, theirs), name


def test_safetensors_reads_each_file(tmp_path: Path) -> None:
    tensors = whole_tensors() | of_each_dtype()
    shards = shards_of(tensors, 3)
    files().save(str(tmp_path / "step"), shards)
    for rank, pieces in enumerate(shards, start=1):
        file = tmp_path / "step" / f"shard-{rank:05}-model-00001-of-00001.safetensors"
        assert_same(load_file(file), {name: piece for name, piece, _ in pieces})
        with safe_open(file, framework="pt") as opened:
            assert set(opened.metadata()) == {"format", "DCP_VERSION", "DCP_SHARDING_INFO", "WRITTEN_BY"}
            assert opened.metadata()["format"] == "pt" and opened.metadata()["DCP_VERSION"] == "1.0"
    assert_same(files().load(str(tmp_path / "step")), tensors)


def test_several_pieces_of_a_rank_are_in_several_files(tmp_path: Path) -> None:
    tensor = torch.arange(35.0).view(7, 5)
    first = [("x", tensor[:1].contiguous(), [0, 0]), ("x", tensor[1:2, :3].contiguous(), [1, 0])]
    rest = [("x", tensor[1:2, 3:].contiguous(), [1, 3]), ("x", tensor[2:].contiguous(), [2, 0])]
    files().save(str(tmp_path / "step"), [first, rest])
    assert files().chunks(str(tmp_path / "step")) == {"x": 4}
    state = {"x": torch.zeros(7, 5)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step")), no_dist=True)
    assert torch.equal(state["x"], tensor)
    assert torch.equal(files().load_piece(str(tmp_path / "step"), "x", [1, 1], [3, 4]), tensor[1:4, 1:])


@pytest.mark.parametrize("ranks", [1, 3])
def test_torch_loads_ours(ranks: int, tmp_path: Path) -> None:
    tensors = whole_tensors()
    files().save(str(tmp_path / "step"), shards_of(tensors, ranks))
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step")), no_dist=True)
    assert_same(state, tensors)


def ours_on_other_ranks(rank: int, folder: str) -> None:
    tensors = whole_tensors()
    mesh = init_device_mesh("cpu", (2,))
    placements = {"0.weight": Shard(1), "0.bias": Shard(0), "1.weight": Shard(0), "step": Replicate()}
    state = {
        name: distribute_tensor(torch.zeros_like(tensors[name]), mesh, [placement])
        for name, placement in placements.items()
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), tensors[name]), f"rank {rank}: {name}"


def test_torch_loads_ours_onto_a_mesh(tmp_path: Path) -> None:
    files().save(str(tmp_path / "step"), shards_of(whole_tensors(), 3))
    run_ranks(2, ours_on_other_ranks, str(tmp_path / "step"))


def torchs(rank: int, folder: str, consolidated: bool) -> None:
    tensors = whole_tensors()
    mesh = init_device_mesh("cpu", (3,))
    placements = {"0.weight": Shard(0), "0.bias": Shard(0), "1.weight": Shard(1), "scale": Replicate()}
    state: dict[str, DTensor] = {
        name: distribute_tensor(tensors[name], mesh, [placement]) for name, placement in placements.items()
    }
    # Torch consolidates neither whole numbers nor tensors without dimensions.
    places = {"0.weight": 1, "0.bias": 2, "1.weight": 1, "scale": 2}
    writer = HuggingFaceStorageWriter(folder, places, save_distributed=True, enable_consolidation=consolidated)
    dcp.save(state, storage_writer=writer)


@pytest.mark.parametrize("consolidated", [False, True])
def test_ours_loads_what_torch_saves_from_ranks(consolidated: bool, tmp_path: Path) -> None:
    run_ranks(3, torchs, str(tmp_path), consolidated)
    expected = {name: whole_tensors()[name] for name in ("0.weight", "0.bias", "1.weight", "scale")}
    assert_same(files().load(str(tmp_path)), expected)
    pieces = {"0.weight": 3, "0.bias": 3, "1.weight": 3, "scale": 1}
    assert files().chunks(str(tmp_path)) == (dict.fromkeys(pieces, 1) if consolidated else pieces)
    if consolidated:
        assert (tmp_path / "model.safetensors.index.json").exists()
        assert files().chunks(str(tmp_path / "sharded")) == pieces
    column = files().load_piece(str(tmp_path), "0.weight", [1, 2], [5, 1])
    assert torch.equal(column, whole_tensors()["0.weight"][1:6, 2:3])


def test_ours_loads_what_torch_saves_from_one_rank(tmp_path: Path) -> None:
    tensors = whole_tensors()
    places = {name: 1 + index % 2 for index, name in enumerate(tensors)}
    writer = HuggingFaceStorageWriter(str(tmp_path), places)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    assert_same(files().load(str(tmp_path)), tensors)


def test_ours_loads_what_safetensors_saves(tmp_path: Path) -> None:
    tensors = whole_tensors() | of_each_dtype()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(files().load(str(tmp_path)), tensors)


def test_damage_is_told_by_file_and_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    files().save(str(folder), shards_of(whole_tensors(), 2))
    file = folder / "shard-00002-model-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RuntimeError, match=r"the values of '[^']+' in .*shard-00002-model-00001-of-00001.safetensors"):
        files().load(str(folder))
