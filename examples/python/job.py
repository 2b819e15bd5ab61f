"""What the programs have in common: arguments, the ranks, and the losses that they tell."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import GptOptions
from torch import Tensor

#: Small: for a minute on a few cores.
SHAPE = GptOptions(context=64, width=96, heads=4, layers=4)


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--corpus", type=Path, default=Path(argparse.__file__), help="the text to learn: any file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="an existing folder, where each rank writes its losses")
    return parser


def join() -> torch.device:
    """Joins the ranks that torchrun started. Returns where this one computes."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    return device


def leave() -> None:
    """Leaves the ranks, all at once: whoever ends early breaks a collective that others are still in."""
    dist.barrier()
    dist.destroy_process_group()


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


class Losses:
    """A line for each step on the terminal, and in a file of this rank, with all digits."""

    def __init__(self, folder: Path | None, shown: bool) -> None:
        self._file = (folder / f"rank{dist.get_rank()}.jsonl").open("w") if folder else None
        self._shown = shown

    def tell(self, step: int, loss: float) -> None:
        if self._shown:
            print(f"step {step:3}  loss {loss:.4f}", flush=True)
        if self._file is not None:
            print(json.dumps({"step": step, "loss": loss}), file=self._file, flush=True)
