"""python -m shardwise checkpoint: lists, verifies and merges."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwise import _checkpoint_command, checkpoint
from shardwise.__main__ import main
from shardwise.testing import run_ranks


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    import argparse

    parser = argparse.ArgumentParser()
    _checkpoint_command.add_arguments(parser)
    code = _checkpoint_command.run(parser.parse_args([str(argument) for argument in arguments]))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).bfloat16())
    adam = torch.optim.AdamW(model.parameters())
    checkpoint.save(tmp_path / "run" / "step-7", model, adam, values={"step": 7}, tensors={"own": torch.ones(2)})
    return model


def test_lists(capsys: pytest.CaptureFixture[str], model: nn.Module, tmp_path: Path) -> None:
    for folder in (tmp_path / "run", tmp_path / "run" / "step-7"):
        code, out, _ = command(capsys, folder)
        lines = [line.split() for line in out.splitlines()]
        assert code == 0
        assert out.startswith(f"{tmp_path / 'run' / 'step-7'}: ") and out.splitlines()[0].endswith("written by 1 rank")
        assert ["step", "=", "7"] in lines
        assert ["0.weight", "float32", "[5,", "3]", "60", "B"] in lines
        assert ["1.weight", "bfloat16", "[2,", "5]", "20", "B"] in lines
        assert ["program.own", "float32", "[2]", "8", "B"] in lines


def test_verifies(capsys: pytest.CaptureFixture[str], model: nn.Module, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step-7"
    assert command(capsys, folder, "--verify") == (0, f"{folder} is what was saved.\n", "")
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    code, out, _ = command(capsys, folder, "--verify")
    assert code == 1 and file.name in out


@pytest.mark.parametrize(("size", "files"), [(5, 1), (90e-9, 2)])
def test_merges(capsys: pytest.CaptureFixture[str], model: nn.Module, tmp_path: Path, size: float, files: int) -> None:
    to = tmp_path / "merged"
    code, out, _ = command(capsys, tmp_path / "run", "--merge", to, "--file-size", size)
    names = [Path(line).name for line in out.splitlines()]
    assert code == 0 and sorted(names) == sorted(path.name for path in to.iterdir())
    tensors = {name: value for path in to.glob("*.safetensors") for name, value in load_file(path).items()}
    assert len(list(to.glob("*.safetensors"))) == files
    assert tensors.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert tensors[name].dtype == value.dtype and torch.equal(tensors[name], value), name
    if files > 1:
        index = json.loads((to / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
        for name, file in index["weight_map"].items():
            assert name in load_file(to / file)
    # Ours reads it too.
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).bfloat16())
    checkpoint.load(to, other)
    assert all(torch.equal(one, two) for one, two in zip(other.parameters(), model.parameters(), strict=True))
    code, _, err = command(capsys, tmp_path / "run", "--merge", to)
    assert code == 1 and "exists already" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "run"]


def leaves_a_save(_: int, folder: str) -> None:
    """Of a process that ends."""
    checkpoint.save(folder, nn.Linear(2, 2))
    owner = json.loads(Path(folder, "shardwise.json").read_text())["content"]["save"]
    Path(folder).rename(f"{folder}.saving-{owner}")


def test_leftovers(capsys: pytest.CaptureFixture[str], model: nn.Module, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert command(capsys, root, "--leftovers") == (0, f"{root} has no leftovers.\n", "")
    run_ranks(1, leaves_a_save, str(root / "step-8"), backend=None)
    (left,) = root.glob("*saving*")
    for folder in (root, root / "step-7"):
        assert command(capsys, folder, "--leftovers") == (0, f"{left}: its process has ended\n", "")
    removed = f"removed {left}\n{root} has no leftovers.\n"
    assert command(capsys, root, "--remove-leftovers") == (0, removed, "")
    assert [path.name for path in root.iterdir()] == ["step-7"]


def test_a_dtype_that_torch_does_not_have(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    header = json.dumps({"odd": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    code, out, _ = command(capsys, tmp_path)
    assert code == 0 and "odd has the dtype F6_E2M3, which torch does not have" in out
    code, _, err = command(capsys, tmp_path, "--merge", tmp_path / "to")
    assert code == 1 and "'odd'" in err


def test_a_folder_that_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", "checkpoint", str(tmp_path)])
    assert main() == 1
    shown = capsys.readouterr()
    assert shown.out == "" and str(tmp_path) in shown.err
