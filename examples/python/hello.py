"""One backward on every rank, on different data: each rank then has the mean of the gradients.

Start it with: python -m torch.distributed.run --standalone --nproc-per-node 2 examples/python/hello.py
"""

import torch
import torch.distributed as dist

import shardwise

dist.init_process_group()
model = shardwise.replicate(torch.nn.Linear(4, 1))

# Rank 0 feeds ones, rank 1 twos, and so on: alone, each would have its own input as the gradient of the weight.
model(torch.full((1, 4), dist.get_rank() + 1.0, device=model.weight.device)).sum().backward()

if dist.get_rank() == 0:
    print(f"{shardwise.plan(model)}gradient of each weight: {model.weight.grad[0, 0].item():g}")
dist.destroy_process_group()
