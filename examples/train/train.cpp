#include <shardwise/shardwise.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  const auto mesh = shardwise::Mesh::from_env(); // the ranks that torchrun started, or a world of one
  torch::manual_seed(0);
  torch::nn::Sequential model{torch::nn::Linear(8, 64), torch::nn::ReLU(), torch::nn::Linear(64, 1)};
  shardwise::fully_shard(model, shardwise::FullyShardOptions().mesh(mesh)); // from now on each rank holds its shards
  torch::optim::AdamW optimizer(model->parameters(), 3e-2); // made after wrapping: it steps on the shards

  torch::manual_seed(1 + mesh.rank()); // each rank has data of its own
  for (int step = 1; step <= 4; ++step) {
    const auto x = torch::randn({256, 8}).to(mesh.device());
    const auto loss = torch::mse_loss(model->forward(x), x.sum(1, true));
    optimizer.zero_grad();
    loss.backward(); // each rank gets its part of the mean of all ranks' gradients
    optimizer.step();
    const auto mean = mesh.mean(loss.item<double>()); // all ranks call it
    if (mesh.rank() == 0) std::printf("step %d  loss %.3f\n", step, mean);
  }
}
