// One backward on every rank, on different data: each rank then has the mean of the gradients.
// Start it with: python -m torch.distributed.run --standalone --no-python --nproc-per-node 2 hello
#include <shardwise/shardwise.h>

#include <torch/torch.h>

#include <iostream>

int main() {
  auto mesh = shardwise::Mesh::from_env();
  torch::nn::Linear model(4, 1);
  model->to(mesh.device());
  auto unit = shardwise::replicate(model);

  // Rank 0 feeds ones, rank 1 twos, and so on: alone, each would have its own input as the gradient of the weight.
  const auto input = torch::full({1, 4}, static_cast<double>(mesh.rank() + 1), mesh.device());
  model->forward(input).sum().backward();

  if (mesh.rank() == 0) {
    std::cout << unit.plan().table() << "gradient of each weight: " << model->weight.grad()[0][0].item<float>() << "\n";
  }
}
