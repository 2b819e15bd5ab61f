#include "host_parallelism.h"

#include "instant_group.h"
#include "measured.h"

#include <shardwise/shardwise.h>

namespace {

using Tensors = std::vector<torch::Tensor>;

/// Its inner layer is `hidden` wide.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(int64_t hidden)
      : up(register_module("up", torch::nn::Linear(4, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, 4))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return down(up(x));
  }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Pair);

shardwise::Mesh instant_mesh(const c10::intrusive_ptr<InstantBackend>& backend) {
  return shardwise::Mesh::from_process_groups({"ranks"}, {instant_group(backend)}, torch::kCPU);
}

void measure_layers(const Size& size) {
  const auto pairs = [&](int64_t hidden) {
    torch::nn::Sequential model;
    for (int64_t i = 0; i < size.blocks; ++i) model->push_back(Pair(hidden));
    return model;
  };
  const auto x = torch::ones({8, 4});
  const auto train = [&](const std::string& name, torch::nn::Sequential& model) {
    measure(name, size, [&] {
      model->forward(x).sum().backward();
      model->zero_grad();
    });
  };
  constexpr int64_t kPiece = 4;
  auto plain = pairs(kPiece);
  train("layers_none", plain);
  const auto backend = c10::make_intrusive<InstantBackend>(0, size.ranks);
  auto divided = pairs(kPiece * size.ranks);
  parallelize(
      divided, instant_mesh(backend), "ranks", {{"*.up", shardwise::colwise()}, {"*.down", shardwise::rowwise()}});
  backend->answers = false;
  train("layers", divided);
}

void measure_microbatches(const Size& size) {
  torch::nn::Linear first(4, 4);
  torch::nn::Linear second(4, 4);
  const auto x = torch::ones({8 * size.blocks, 4});
  const auto loss = [](const Tensors& outputs, const Tensors& targets) { return (outputs[0] - targets[0]).sum(); };
  measure("microbatches_none", size, [&] {
    for (const auto& part : x.chunk(size.blocks)) {
      const auto between = first(part);
      const auto input = between.detach().requires_grad_();
      loss({second(input)}, {part}).backward();
      between.backward(input.grad());
    }
  });
  shardwise::Pipeline pipeline(
      instant_mesh(c10::make_intrusive<InstantBackend>(0, 1)), "ranks",
      [&](int64_t stage) { return shardwise::PipelineStage(stage == 0 ? first : second); },
      shardwise::PipelineOptions()
          .schedule(shardwise::PipelineSchedule::interleaved)
          .stages_per_rank(2)
          .microbatches(size.blocks)
          .loss(loss));
  measure("microbatches", size, [&] { pipeline.step({x}, {x}); });
}

} // namespace

void measure_parallelism(const Size& size) {
  measure_layers(size);
  measure_microbatches(size);
}
