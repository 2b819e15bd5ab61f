// What a rank allocates in a step, beside what estimate_memory() says: one process for a wrapping.
//
//   memory_steps --wrap fully_shard --layers 4 --width 384 --rank 0 --world 2 [--store FILE]
//
// With a store the ranks are processes that communicate; without one, this one takes itself for a rank whose
// collectives do nothing and allocate nothing. Prints a line of JSON. benchmarks/python/memory_steps.py is the same
// from Python.
#include <shardwise/shardwise.h>

#include "meters.h"
#include "model.h"
#include "rank_program.h"

#include <torch/torch.h>

#include <limits>

namespace {

constexpr int kSteps = 6;
/// Few, so that next to the parameters activations are small.
constexpr int64_t kBytesOfText = 8;

/// One wrapping: how it is applied, and what the formula says of it.
struct Wrapping {
  std::function<shardwise::Unit(torch::nn::Module&, const shardwise::Mesh&)> apply;
  std::function<shardwise::MemoryEstimate(const torch::nn::Module&, int64_t, const shardwise::EstimateOptions&)> ask;
};

template <typename Options, typename Apply>
Wrapping wrapping(const Options& options, const Apply& apply) {
  return {
      [=](torch::nn::Module& module, const shardwise::Mesh& mesh) {
        auto with_mesh = options;
        return apply(module, with_mesh.mesh(mesh));
      },
      [=](const torch::nn::Module& module, int64_t world, const shardwise::EstimateOptions& more) {
        return shardwise::estimate_memory(module, options, world, more);
      }};
}

Wrapping wrapping_of(const std::string& name) {
  const auto shard = [](torch::nn::Module& module, const auto& options) { return fully_shard(module, options); };
  const auto copy = [](torch::nn::Module& module, const auto& options) { return replicate(module, options); };
  const auto bfloat = shardwise::MixedPrecision().param_dtype(at::kBFloat16).reduce_dtype(at::kFloat);
  using Shard = shardwise::FullyShardOptions;
  using Copy = shardwise::ReplicateOptions;
  if (name == "fully_shard") return wrapping(Shard(), shard);
  if (name == "fully_shard_keep") return wrapping(Shard().reshard_after_forward(false), shard);
  if (name == "fully_shard_flat") return wrapping(Shard().layout(shardwise::ShardLayout::flat), shard);
  if (name == "fully_shard_bfloat16") return wrapping(Shard().mixed_precision(bfloat), shard);
  if (name == "replicate") return wrapping(Copy(), copy);
  if (name == "replicate_bfloat16") return wrapping(Copy().mixed_precision(bfloat), copy);
  throw std::invalid_argument("memory_steps: there is no --wrap " + name + ".");
}

std::vector<const torch::nn::Module*> blocks_of(const Gpt& model) {
  std::vector<const torch::nn::Module*> blocks;
  for (const auto& block : *model->blocks) blocks.push_back(block.get());
  return blocks;
}

void run(const Arguments& given) {
  GptOptions shape;
  shape.layers = std::stoll(given.at("--layers"));
  shape.width = std::stoll(given.at("--width"));
  const auto world = std::stoi(given.at("--world"));
  const auto rank = std::stoi(given.at("--rank"));
  const auto& name = given.at("--wrap");
  const auto wrapping = wrapping_of(name);
  shardwise::MemoryEstimate estimate;
  {
    auto plain = shardwise::on_meta([&] { return Gpt(shape); });
    estimate = wrapping.ask(
        *plain, world,
        shardwise::EstimateOptions().rank(name.starts_with("replicate") ? 0 : rank).units(blocks_of(plain)));
  }

  const shardwise::Mesh mesh({{"world", world}}, mesh_options(given));
  const auto resident_before = status_mib("VmRSS");
  meters_watch_memory();
  shardwise::set_shared_memory_listener(&meters_add_memory);
  Gpt model(shape);
  initialize(*model, 1);
  const auto parameter_bytes = 4 * number_of_parameters(*model);
  for (auto& block : *model->blocks) wrapping.apply(*block, mesh);
  const auto unit = wrapping.apply(*model, mesh);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-4));

  int64_t forward = 0;
  int64_t backward = std::numeric_limits<int64_t>::max();
  int64_t pieces = 0;
  int64_t buffers = 0;
  const auto text = torch::randint(0, shape.vocabulary, {1, kBytesOfText + 1});
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto pieces_before = meters_allocations();
    const auto buffers_before = unit.counters().allocations;
    meters_forget_peak();
    const auto scores = model->forward(text.narrow(1, 0, kBytesOfText));
    auto loss = torch::cross_entropy_loss(scores.flatten(0, 1), text.narrow(1, 1, kBytesOfText).flatten());
    forward = meters_peak_bytes();
    meters_forget_peak();
    loss.backward();
    // A sum that is late holds gradients back in some steps.
    if (step > 1) backward = std::min(backward, meters_peak_bytes());
    loss = torch::Tensor();
    pieces = meters_allocations() - pieces_before;
    buffers = unit.counters().allocations - buffers_before;
    optimizer.step();
  }
  std::cout << "{\"parameter_bytes\": " << parameter_bytes << ", \"forward_peak\": " << forward
            << ", \"backward_peak\": " << backward << ", \"after_step\": " << meters_bytes()
            << ", \"allocations\": " << pieces << ", \"buffers\": " << buffers
            << ", \"resident_mib\": " << status_mib("VmHWM") - resident_before << ", \"estimate\": " << estimate.json()
            << "}" << std::endl;
}

} // namespace

int main(int count, char** arguments) {
  return run_rank_program(count, arguments, run);
}
