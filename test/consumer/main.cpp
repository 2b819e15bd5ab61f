// Each rank starts from other values and has other data: weight = rank + 1, input = rank + 1.
// After replicate() and a backward every rank has the weight of rank 0 and the mean of the inputs as gradient.
#include <shardwise/shardwise.h>

#include <torch/nn/modules/linear.h>

#include <iostream>
#include <sstream>

int main() {
  const auto mesh = shardwise::Mesh::from_env(shardwise::MeshOptions().device(at::kCPU));
  const auto own = static_cast<double>(mesh.rank() + 1);
  torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
  {
    torch::NoGradGuard no_grad;
    model->weight.fill_(own);
  }
  shardwise::replicate(model, shardwise::ReplicateOptions().mesh(mesh));
  model->forward(torch::full({1, 1}, own)).sum().backward();

  // One write a rank, so that lines of two ranks do not mix.
  std::ostringstream line;
  line << "rank " << mesh.rank() << " of " << mesh.size() << ": weight " << model->weight.item<double>()
       << ", gradient " << model->weight.grad().item<double>() << "\n";
  std::cout << line.str() << std::flush;
}
