"""Trains a GPT in a pipeline of stages, each in several replicas, with the wide layers cut by tensor parallelism.

Nothing here knows of shardwise. Start it on 8 ranks (2 stages of 2 replicas of 2), with torch's engine, or with
shardwise in its place:

python -m torch.distributed.run --standalone --nproc-per-node 8 examples/python/pipeline.py
SHARDWISE_INSTALL=1 python -m torch.distributed.run --standalone --nproc-per-node 8 examples/python/pipeline.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from batches import Batches
from job import SHAPE, Losses, arguments, join, leave, loss_of
from model import Gpt, initialize
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MICROBATCHES = 4


class Stage(nn.Module):
    """Some blocks of the model. The first stage embeds before them, the last gives scores after them."""

    def __init__(self, model: Gpt, number: int, stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // stages
        if number == 0:
            self.bytes, self.positions = model.bytes, model.positions
        self.blocks = model.blocks[number * each : (number + 1) * each]
        if number == stages - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "bytes"):
            x = self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        if hasattr(self, "head"):
            x = self.head(self.norm(x))
        return x


def distribute(stage: Stage, mesh: DeviceMesh) -> None:
    for block in stage.blocks:
        parallelize_module(block, mesh["tensor"], {"expand": ColwiseParallel(), "contract": RowwiseParallel()})
        replicate(block, mesh=mesh["replicas"])
    replicate(stage, mesh=mesh["replicas"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share the wide layers of a replica")
    parser.add_argument("--batch", type=int, default=8, help="sequences that a replica takes in a step")
    options = parser.parse_args()
    device = join()
    replicas = dist.get_world_size() // (options.stages * options.tensor)
    sizes = (options.stages, replicas, options.tensor)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("stages", "replicas", "tensor"))
    number, replica = mesh["stages"].get_local_rank(), mesh["replicas"].get_local_rank()
    is_last = number == options.stages - 1

    model = Gpt(SHAPE)
    initialize(model, options.seed)
    stage = Stage(model, number, options.stages).to(device)
    distribute(stage, mesh)
    group = mesh["stages"].get_group()
    pipeline = PipelineStage(stage, number, options.stages, device, group=group)
    schedule = Schedule1F1B(pipeline, MICROBATCHES, loss_fn=loss_of)
    shown = is_last and replica == 0 and mesh["tensor"].get_local_rank() == 0
    if shown:
        print(f"{replicate.__module__}.replicate on {mesh}", flush=True)

    # One by one: some parameters are on a mesh of two axes, others of one.
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    batches = Batches(options.corpus, options.seed, options.batch, SHAPE.context)
    losses = Losses(options.out, shown)
    for step in range(1, options.steps + 1):
        batch = batches.draw(step, replica, device)
        inputs = [batch.input.contiguous()] if number == 0 else []
        if is_last:
            parts: list[Tensor] = []
            schedule.step(*inputs, target=batch.target, losses=parts)
            losses.tell(step, torch.stack(parts).mean().item())
        else:
            schedule.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
    leave()


if __name__ == "__main__":
    main()
