"""Trains a sharded GPT, leaves checkpoints, and goes on from the newest when started again, on any number of ranks.

Nothing here knows of shardwise. Start it twice, with torch's engine, or with SHARDWISE_INSTALL=1 in the environment and
so with shardwise in its place; either engine goes on from the other's checkpoint:

python -m torch.distributed.run --standalone --nproc-per-node 2 examples/python/resume.py --steps 10
python -m torch.distributed.run --standalone --nproc-per-node 4 examples/python/resume.py --steps 20
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from batches import Batch, Batches
from job import SHAPE, Losses, arguments, join, leave, loss_of
from model import Gpt, initialize
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--checkpoints", type=Path, default=Path("build/checkpoints"), help="the folder of checkpoints")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--parts", type=int, default=4, help="of a step's batch; a multiple of the number of ranks")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a part")
    options = parser.parse_args()
    device = join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))

    model = Gpt(SHAPE)
    initialize(model, options.seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    done = load(options.checkpoints, model, optimizer)
    if rank == 0:
        print(f"{fully_shard.__module__}.fully_shard on {mesh}, after step {done}", flush=True)

    batches = Batches(options.corpus, options.seed, options.batch, SHAPE.context)
    losses = Losses(options.out, shown=rank == 0)
    for step in range(done + 1, options.steps + 1):
        # The same batch for any number of ranks.
        parts = [batches.draw(step, part, device) for part in range(rank, options.parts, ranks)]
        batch = Batch(torch.cat([part.input for part in parts]), torch.cat([part.target for part in parts]))
        loss = loss_of(model(batch.input), batch.target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.tell(step, mean.item())
        if step % options.every == 0 or step == options.steps:
            save(options.checkpoints, model, optimizer, step)
    leave()


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    values, moments = get_state_dict(model, optimizer)
    dcp.save({"model": values, "optimizer": moments, "step": step}, checkpoint_id=folder / f"step-{step:06}")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the step that the newest checkpoint was left after; 0 when there is none."""
    # It is written last.
    complete = sorted(folder.glob("step-*/.metadata"))
    if not complete:
        return 0
    values, moments = get_state_dict(model, optimizer)
    state = {"model": values, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=complete[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=moments)
    return int(state["step"])


if __name__ == "__main__":
    main()
