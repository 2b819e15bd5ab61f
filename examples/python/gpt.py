"""Trains a small GPT on the ranks that torchrun started, each on its own batches, or in one process on all of them.

The same training as examples/cpp/main.cpp, with the same arguments and the same records.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from batches import Batch, Batches
from job import join, leave, loss_of
from model import Gpt, GptOptions, initialize
from progress import Progress
from records import Record, Records, device_mib, resident_mib

import shardwise


def main() -> None:
    options = parse_arguments()
    if options.reference_of:
        train(options, range(options.reference_of), torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
        return
    device = join()
    train(options, [dist.get_rank()], device)
    leave()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="the text to learn: any file")
    parser.add_argument("--out", type=Path, required=True, help="an existing folder for the records")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--reference-of",
        type=int,
        default=0,
        help="no ranks: one process takes the batches of that many ranks and averages their gradients by itself",
    )
    return parser.parse_args()


def distribute(model: Gpt) -> None:
    """Spreads the model over the ranks: a unit for each block, and one for the rest."""
    for block in model.blocks:
        shardwise.replicate(block)
    shardwise.replicate(model)


def train(options: argparse.Namespace, ranks: range | list[int], device: torch.device) -> None:
    """Trains on the batches of `ranks`: of this rank alone, or in one process of all."""
    reference = bool(options.reference_of)
    shape = GptOptions()
    model = Gpt(shape)
    # All ranks start from the same seed: replicate() compares names and shapes, and sends no values.
    initialize(model, options.seed)
    model.to(device)
    if not reference:
        distribute(model)
        if dist.get_rank() == 0:
            print(shardwise.plan(model), flush=True)
            write_facts(options, shape, model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    batches = Batches(options.corpus, options.seed, options.batch, shape.context)
    records = Records(options.out / ("reference.jsonl" if reference else f"rank{ranks[0]}.jsonl"))
    progress = Progress("one process" if reference else "step", options.steps)
    tokens = len(ranks) * options.batch * shape.context
    for step in range(1, options.steps + 1):
        begin = time.perf_counter()
        loss = train_step(model, optimizer, [batches.draw(step, rank, device) for rank in ranks])
        rate = tokens / (time.perf_counter() - begin)
        record = Record(step, loss, rate, resident_mib(), device_mib(device))
        records.write(record)
        if progress.due(step):
            losses, rates, memory = [[value] for value in numbers(record)] if reference else gather(record, device)
            if reference or dist.get_rank() == 0:
                progress.show(step, sum(losses) / len(losses), sum(rates), memory)


def train_step(model: Gpt, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> float:
    """One step with the mean of the batches' gradients. Returns their mean loss."""
    total = 0.0
    optimizer.zero_grad()
    for batch in batches:
        loss = loss_of(model(batch.input), batch.target)
        (loss / len(batches)).backward()
        total += loss.item()
    optimizer.step()
    return total / len(batches)


def numbers(record: Record) -> tuple[float, float, float]:
    return record.loss, record.tokens_per_second, record.memory_mib


def gather(record: Record, device: torch.device) -> list[list[float]]:
    """Losses, tokens a second and memory of all ranks. Every rank must call it."""
    mine = torch.tensor(numbers(record), dtype=torch.float64, device=device)
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(received, mine)
    columns: list[list[float]] = torch.stack(received, dim=1).tolist()
    return columns


def write_facts(options: argparse.Namespace, shape: GptOptions, model: Gpt, device: torch.device) -> None:
    facts = {
        "ranks": dist.get_world_size(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "context": shape.context,
        "batch": options.batch,
        "device": device.type,
    }
    (options.out / "run.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
