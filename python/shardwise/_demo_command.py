"""python -m shardwise demo: trains on some ranks of this machine, compares, and draws a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

ABOUT = "trains a small GPT on this machine's CPUs, compares it with one process, and draws the losses"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=int, default=2, help="how many processes (default: 2)")
    command.add_argument("--steps", type=int, default=60, help="default: 60")
    command.add_argument("--mode", choices=("fully_shard", "replicate"), default="fully_shard")
    command.add_argument("--out", type=Path, default=Path("shardwise-demo.svg"), help="the picture")


def run(arguments: argparse.Namespace) -> int:
    # The doctor also starts where torch cannot be imported.
    from shardwise._demo import LIMIT, draw, train_alone, train_rank
    from shardwise.testing import run_ranks

    by_rank = run_ranks(
        arguments.ranks, train_rank, arguments.mode, arguments.steps, backend="shardwise", timeout=3600.0
    )
    alone = train_alone(arguments.ranks, arguments.steps)
    means = [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]
    apart = max(abs(mean - loss) / loss for mean, loss in zip(means, alone, strict=True))
    arguments.out.write_text(draw(by_rank, alone))
    agrees = apart <= LIMIT
    print(f"largest relative difference from one process: {apart:.1e} ({'passed' if agrees else 'FAILED'})")
    print(f"picture: {arguments.out}")
    return 0 if agrees else 1
