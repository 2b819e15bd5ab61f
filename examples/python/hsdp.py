"""Trains a GPT with HSDP and mixed precision: ranks hold shards, and groups of ranks hold copies of the shards.

Nothing here knows of shardwise. Start it on 4 ranks, with torch's engine, or with shardwise in its place:

python -m torch.distributed.run --standalone --nproc-per-node 4 examples/python/hsdp.py
SHARDWISE_INSTALL=1 python -m torch.distributed.run --standalone --nproc-per-node 4 examples/python/hsdp.py
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from batches import Batches
from job import SHAPE, Losses, arguments, join, leave, loss_of
from model import Gpt, initialize
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--copies", type=int, default=2, help="groups of ranks that each hold all shards")
    parser.add_argument("--batch", type=int, default=4, help="sequences in each of a step's two parts, on each rank")
    options = parser.parse_args()
    device = join()
    rank, copies = dist.get_rank(), options.copies
    mesh = init_device_mesh(device.type, (copies, dist.get_world_size() // copies), mesh_dim_names=("copies", "shards"))

    model = Gpt(SHAPE)
    initialize(model, options.seed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))
    if rank == 0:
        print(f"{fully_shard.__module__}.fully_shard on {mesh}", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batches = Batches(options.corpus, options.seed, options.batch, SHAPE.context)
    losses = Losses(options.out, shown=rank == 0)
    for step in range(1, options.steps + 1):
        total = 0.0
        for part in range(2):
            # Copies are averaged once a step, not after each part.
            model.set_requires_all_reduce(part == 1)
            batch = batches.draw(2 * step + part, rank, device)
            loss = loss_of(model(batch.input), batch.target) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.tell(step, total)
    leave()


if __name__ == "__main__":
    main()
