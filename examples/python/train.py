import torch
import torch.distributed as dist

import shardwise

dist.init_process_group("shardwise")  # shardwise's transport, for CPUs
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
shardwise.fully_shard(model)  # from now on each rank holds its shards
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
for step in range(1, 5):
    x = torch.randn(256, 8)
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()  # each rank gets its part of the mean of all ranks' gradients
    optimizer.step()
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"step {step}  loss {mean.item():.3f}")
dist.destroy_process_group()
