"""Ranks that a program starts by itself, forked or spawned, with a loader of data that has processes of its own.

python started_ranks.py fork|spawn layout file-of-the-store
"""

from __future__ import annotations

import multiprocessing
import sys

import torch
import torch.distributed as dist
from engine import TORCH, ours
from layouts import by_layer
from parity import Parity, Trace, adam, assert_same_bits
from torch.utils.data import DataLoader, TensorDataset
from training_models import mlp_program


def rank_of_two(rank: int, layout: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parity = Parity(mlp_program((5, 7, 3), steps=3, optimizer=adam))
    trace: Trace = parity.both(by_layer(layout))
    assert_same_bits(parity.run(ours(), by_layer(layout)), trace)
    # Its processes are forked from one that the engine works in.
    data = TensorDataset(torch.arange(20.0).view(4, 5))
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
    for engine in (TORCH, ours()):
        model = parity.program.make()
        by_layer(layout)(engine, model)
        for _ in range(2):
            total = sum(float(model(rows).detach().sum()) for (rows,) in loader)
            reference = parity.program.make()(data.tensors[0])
            torch.testing.assert_close(total, float(reference.sum()))
    dist.destroy_process_group()


def main(method: str, layout: str, store: str) -> int:
    context = multiprocessing.get_context(method)
    ranks = [context.Process(target=rank_of_two, args=(rank, layout, store)) for rank in range(2)]
    for rank in ranks:
        rank.start()  # type: ignore[attr-defined]
    for rank in ranks:
        rank.join()  # type: ignore[attr-defined]
    return max(abs(rank.exitcode or 0) for rank in ranks)  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
