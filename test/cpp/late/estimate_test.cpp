// estimate_memory() against the late device's allocator.
#include "late_test.h"
#include "ranks/hybrid_models.h"

namespace shardwise::test {
namespace {

/// The most that is used in a forward and in a backward, once a few steps are done.
struct Peaks {
  int64_t forward;
  int64_t backward;
};

constexpr int64_t kWidth = 96;

/// Large next to its activations.
torch::nn::Sequential net() {
  return mlp(std::vector<int64_t>(8, kWidth));
}

/// All but the last layer, whose parameters are the outermost unit's.
std::vector<const torch::nn::Module*> layers_of(torch::nn::Sequential model) {
  std::vector<const torch::nn::Module*> layers;
  for (size_t i = 0; i + 1 < model->size(); i += 2) layers.push_back(model[i].get());
  return layers;
}

Peaks peaks_of_training(Rank& rank, torch::nn::Sequential& model, int64_t before) {
  auto& device = late::Device::of(rank.rank());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01));
  Peaks peaks{};
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    const auto forward = [&] { loss = call(*model, batch(step, rank.rank(), kWidth, 1)).pow(2).mean(); };
    peaks.forward = peak_of(device, forward) - before;
    peaks.backward = peak_of(device, [&] { loss.backward(); }) - before;
    optimizer.step();
  }
  return peaks;
}

void expect_near(int64_t measured, int64_t estimated, const std::string& what) {
  EXPECT_NEAR(static_cast<double>(estimated), static_cast<double>(measured), 0.04 * static_cast<double>(measured))
      << what;
}

} // namespace

TEST(LateEstimate, PeaksOfSteps) {
  run_ranks(4, [](Rank& rank) {
    for (const auto& [what, options, copies] : std::vector<std::tuple<std::string, FullyShardOptions, int64_t>>{
             {"rows", sharded_on(rank), 1},
             {"kept", sharded_on(rank).reshard_after_forward(false), 1},
             {"flat", sharded_on(rank).layout(ShardLayout::flat), 1},
             {"two axes", hybrid_on(rank, {2, 2}), 2}}) {
      auto& device = late::Device::of(rank.rank());
      device.synchronize_all();
      // What was freed while a stream still used it goes back with the next request.
      (void)at::empty({1}, late_device(rank.rank()));
      const auto before = used_on(device);
      auto plain = on_meta(net);
      const auto more =
          EstimateOptions().units(layers_of(plain)).copies(copies).optimizer_factor(0).device(late_device().type());
      const auto estimate = estimate_memory(plain, options, rank.world_size(), more);
      auto model = net();
      for (size_t i = 0; i + 1 < model->size(); i += 2) fully_shard(model->ptr(i), options);
      fully_shard(model, options);
      const auto peaks = peaks_of_training(rank, model, before);
      expect_near(peaks.forward, estimate.forward_peak, "forward, " + what);
      expect_near(peaks.backward, estimate.backward_peak, "backward, " + what);
    }
  });
}

} // namespace shardwise::test
